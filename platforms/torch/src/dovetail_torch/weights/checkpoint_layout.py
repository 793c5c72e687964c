"""Restores the layout of a checkpoint: the inverse of the order in which a weight is assigned."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail_torch.weights.weight_names import StoredLayout, WeightNames


def checkpoint_name(names: WeightNames, own_name: str) -> str:
    """Return the name of a weight of the model in a published checkpoint.

    Models also read experts that are stacked as in the transformers library. Published checkpoints
    have one tensor for each of these experts, with the name in the model.
    """
    name = names.to_checkpoint(own_name)
    layout = names.to_model(name)[1]
    is_own = layout.stacked and not layout.transposed and names.to_model(own_name)[0] == (own_name,)
    return own_name if is_own else name


def join_parts(
    parts: Sequence[torch.Tensor], layout: StoredLayout, feature_dim: int = 0
) -> torch.Tensor:
    """Return the weight of a checkpoint from the weights of the model: see `MappedAssignment`.

    feature_dim: the dimension of the output features of the first part. Returns a view if
    possible.
    """
    rows = parts[0] if len(parts) == 1 else _join_groups(parts, layout)
    if layout.rotary_pairs[1]:
        rows = join_rotary_pairs(rows, layout, feature_dim)
    if layout.stacked:
        rows = rows.unflatten(0, (layout.stacked, -1))
    is_matrix = rows.dim() == (3 if layout.stacked else 2)
    return rows.mT if layout.transposed and is_matrix else rows


def _join_groups(parts: Sequence[torch.Tensor], layout: StoredLayout) -> torch.Tensor:
    """Return the rows of all parts. With several groups, each has an equal share of every part."""
    if layout.groups == 1:
        return torch.cat(list(parts))
    num_stacked = layout.stacked or 1
    num_parts = len(parts) // num_stacked
    return torch.cat(
        [
            torch.cat(
                [part.unflatten(0, (layout.groups, -1)) for part in parts[first:][:num_parts]],
                dim=1,
            ).flatten(0, 1)
            for first in range(0, len(parts), num_parts)
        ]
    )


def join_rotary_pairs(rows: torch.Tensor, layout: StoredLayout, dim: int = 0) -> torch.Tensor:
    """Return a copy of `rows` with the rotary features of each head in pairs instead of halves.

    It is the inverse of `split_rotary_pairs`.
    """
    head_size, rotary_dim = layout.rotary_pairs
    start = head_size - rotary_dim if layout.rotary_last else 0
    sizes = [start, rotary_dim, head_size - rotary_dim - start]
    first, rotary, rest = rows.unflatten(dim, (-1, head_size)).split(sizes, dim=dim + 1)
    halves = rotary.unflatten(dim + 1, (2, -1))
    pairs = halves.transpose(dim + 1, dim + 2).flatten(dim + 1, dim + 2)
    return torch.cat((first, pairs, rest), dim=dim + 1).flatten(dim, dim + 1)

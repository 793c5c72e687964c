"""Rotary features that a checkpoint stores as pairs, in the order of the model's halves."""

from __future__ import annotations

import torch

from dovetail_torch.weights.weight_names import StoredLayout


def split_rotary_pairs(rows: torch.Tensor, layout: StoredLayout, dim: int = 0) -> torch.Tensor:
    """Return a copy of `rows` with the rotary features of each head in halves instead of pairs.

    dim: the dimension of the features of one or more heads. Other features stay in place.
    """
    head_size, rotary_dim = layout.rotary_pairs
    start = head_size - rotary_dim if layout.rotary_last else 0
    sizes = [start, rotary_dim, head_size - rotary_dim - start]
    first, rotary, rest = rows.unflatten(dim, (-1, head_size)).split(sizes, dim=dim + 1)
    pairs = rotary.unflatten(dim + 1, (-1, 2))
    halves = pairs.transpose(dim + 1, dim + 2).flatten(dim + 1, dim + 2)
    return torch.cat((first, halves, rest), dim=dim + 1).flatten(dim, dim + 1)

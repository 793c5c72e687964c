"""The table from a checkpoint's names to the places of a model that they fill.

It is built by walking the model's modules: a parameter has the checkpoint's name, except in a
linear layer that fuses several, whose shape says which names it took in and how many rows each has.
The table knows no file and no format; whoever reads weights asks it where they go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dovetail.errors import WeightError, nearest
from dovetail_torch.layers.linear import ParallelLinear

NUM_SHOWN = 5
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
"""Entries of old checkpoints that are computed and not learnt."""
BORROWED_BYTES = 1 << 20
"""Smaller weights are copied: a mapped page each would be dearer."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Where one checkpoint weight goes: a view of a parameter (or persistent buffer).

    target: written in place, under no_grad; its shape is the shape that the weight must have.
    lend: gives the layer a mapped weight instead of a copy; None where it wants copies.
    """

    name: str
    target: torch.Tensor
    lend: Callable[[torch.Tensor], None] | None = None

    def fill(self, weight: torch.Tensor, *, is_mapped: bool = False) -> None:
        """Copy `weight` to its place, cast to the dtype there.

        is_mapped: it is a private mapping of a file, which a layer that borrows may keep.
        """
        same = weight.dtype == self.target.dtype and weight.device == self.target.device
        if is_mapped and self.lend is not None and same and weight.nbytes >= BORROWED_BYTES:
            self.lend(weight)
        else:
            self.target.copy_(weight)

    def check(self, shape: Collection[int], source: str) -> None:
        """Raise WeightError unless `shape` is the target's; `source` names the file."""
        if tuple(shape) != tuple(self.target.shape):
            raise WeightError(
                f"{source}: weight {self.name} has the shape {list(shape)}, the model of "
                f"config.json has {list(self.target.shape)}: config and weights do not belong "
                "together"
            )


@dataclass(frozen=True, kw_only=True)
class WeightTable:
    """All assignments by checkpoint name, and second names of weights that are shared.

    aliases: second name to first, such as a tied "lm_head.weight" to "model.embed_tokens.weight".
    settled: names whose weights the model has already, and that are not to be read.
    """

    assignments: dict[str, Assignment]
    aliases: dict[str, str]
    settled: frozenset[str] = frozenset()

    def select(self, names: Collection[str], source: str) -> dict[str, Assignment]:
        """Return the assignment of each of `names` that is to be read; the rest can be skipped.

        Together they fill every parameter exactly once. Raises WeightError, naming `source` and
        the first few names, for weights that are missing or unexpected.
        """
        chosen: dict[str, Assignment] = {}
        unexpected = []
        for name in names:
            canonical = self.aliases.get(name, name)
            if canonical in self.settled:
                continue
            if canonical not in self.assignments:
                if not name.endswith(IGNORED_ENDINGS):
                    unexpected.append(name)
            elif canonical == name or canonical not in names:
                chosen[name] = self.assignments[canonical]
        filled = {assignment.name for assignment in chosen.values()}
        missing = [name for name in self.assignments if name not in filled]
        if missing:
            raise WeightError(
                f"{source}: {_listed(missing)} missing. The checkpoint is not complete, or "
                f"config.json describes another model{_hint(missing, unexpected)}"
            )
        if unexpected:
            raise WeightError(
                f"{source}: {_listed(unexpected)} unknown to the model. config.json describes "
                "another model, or the checkpoint has more than this architecture uses"
            )
        return chosen


def build_weight_table(model: nn.Module) -> WeightTable:
    """Return the table of all parameters and persistent buffers of `model`."""
    layers = dict(model.named_modules(remove_duplicate=False))
    assignments: dict[str, Assignment] = {}
    aliases: dict[str, str] = {}
    settled: set[str] = set()
    first_names: dict[int, str] = {}

    def is_settled(name: str) -> bool:
        prefix, _, leaf = name.rpartition(".")
        return leaf in getattr(layers[prefix], "settled", ())

    # Settled ones last: a weight that a settled layer shares with another is still to be read.
    state = model.state_dict(keep_vars=True)
    for name, tensor in sorted(state.items(), key=lambda item: is_settled(item[0])):
        prefix, _, leaf = name.rpartition(".")
        layer = layers[prefix]
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name:
            aliases[name] = first_name
            continue
        parts = dict(_parts(layer, prefix, leaf, tensor.detach()))
        if is_settled(name):
            settled.update(parts)
            continue
        borrows = leaf in getattr(layer, "borrows", ())
        for number, (part_name, target) in enumerate(parts.items()):
            lend = partial(layer.borrow, number) if borrows else None
            assignments[part_name] = Assignment(name=part_name, target=target, lend=lend)
    return WeightTable(assignments=assignments, aliases=aliases, settled=frozenset(settled))


def _parts(
    layer: nn.Module, prefix: str, leaf: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield checkpoint name and view for each part of one parameter."""
    dot = "." if prefix else ""
    if not isinstance(layer, ParallelLinear) or len(layer.shape.part_names) == 1:
        yield f"{prefix}{dot}{leaf}", tensor
        return
    parent, dot, _ = prefix.rpartition(".")
    shape = layer.shape
    for part_name, rows in zip(shape.part_names, tensor.split(shape.part_sizes), strict=True):
        yield f"{parent}{dot}{part_name}.{leaf}", rows


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_SHOWN])
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return f"{len(names)} weight{'s' if len(names) > 1 else ''} ({shown}{more})"


def _hint(missing: list[str], unexpected: list[str]) -> str:
    close = nearest(missing[0], unexpected)
    return f".{close}" if close else ""

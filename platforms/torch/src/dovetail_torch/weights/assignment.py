"""The mapping of a checkpoint's weight names to the parameters of a model.

It is built from the model's modules: a parameter has the checkpoint's name, except in a fused
linear layer, whose shape lists the fused names and their numbers of rows.
A model whose checkpoints use different names or layouts declares them (`weight_mappings`).
If several ranks share the model, the layers determine which part of a weight this rank has.
The mapping does not depend on files or formats; weight loaders use it to find the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from dovetail.errors import WeightError, nearest
from dovetail.interfaces.model import WeightMapping
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.layers.embedding import VocabParallelEmbedding
from dovetail_torch.layers.linear import BlockWeight, ParallelLinear
from dovetail_torch.layers.state import CausalConv
from dovetail_torch.weights.kv_scales import (
    ScaleAssignment,
    is_kv_scale,
    normal_scale_name,
    scale_targets,
)
from dovetail_torch.weights.rotary_pairs import split_rotary_pairs
from dovetail_torch.weights.weight_names import PLAIN, StoredLayout, WeightNames

QUANTIZED_ENDINGS = (".qweight", ".qzeros", ".g_idx", ".weight_packed", ".weight_scale_inv")
NUM_SHOWN = 5
IGNORED_ENDINGS = ("rotary_emb.inv_freq",)
"""Entries of old checkpoints that the model computes instead of loading them."""
BORROWED_BYTES = 1 << 20
"""Smaller weights are copied, because a mapped page for each would need more memory."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The target of one checkpoint weight: a view of a parameter or of a persistent buffer.

    target: tensor that is written in place, under no_grad; has the shape of this rank's part of the
    weight. lend: function that passes a mapped weight to the layer instead of a copy; None if the
    layer needs a copy. shards: this rank's part of the weight's first dimensions; other dimensions
    are not sharded. takers: linear layers, each with the index of its part that is this weight;
    they may use quantized blocks. is_table: whether another module, an embedding, uses the target
    too.
    feature_dim: dimension of the output features; other modules than linear layers have them last.
    convert: changes the loaded values in place; None if the model uses them as they are.
    """

    name: str
    target: torch.Tensor
    lend: Callable[[torch.Tensor], None] | None = None
    shards: tuple[Shard, ...] = ()
    takers: tuple[tuple[ParallelLinear, int], ...] = ()
    is_table: bool = False
    feature_dim: int = 0
    convert: Callable[[torch.Tensor], None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The required shape of the checkpoint's weight."""
        wholes = tuple(shard.whole for shard in self.shards)
        return wholes + tuple(self.target.shape[len(wholes) :])

    def fill(self, weight: torch.Tensor, *, is_mapped: bool = False) -> int:
        """Copy this rank's part of `weight` to its target, cast to the target's dtype.

        is_mapped: whether `weight` is a private mapping of a file, which a layer may keep instead
        of a copy; only this rank's part is read. Returns the size of this part in `weight`.
        """
        part = weight[tuple(shard.slice for shard in self.shards)] if self.shards else weight
        same = part.dtype == self.target.dtype and part.device == self.target.device
        if is_mapped and self.lend is not None and same and part.nbytes >= BORROWED_BYTES:
            self.lend(part)
        else:
            self.target.copy_(part)
        self.finish()
        return part.nbytes

    def finish(self) -> None:
        """Convert the values of the target, after all of them are loaded."""
        if self.convert is not None:
            self.convert(self.target)

    def takes_blocks(self, type_name: str, block_values: int) -> bool:
        """Return whether a layer supports blocks of this type, and the rank has whole blocks."""
        is_cut = any(shard.start % block_values or shard.size % block_values for shard in self._in)
        return not is_cut and any(type_name in layer.block_types for layer, _ in self.takers)

    def expect_blocks(self, type_name: str) -> None:
        """Announce to the layers that `share_blocks` will be called."""
        for layer, part in self.takers:
            layer.expect_blocks(part, type_name)

    def share_blocks(self, blocks: BlockWeight) -> None:
        """Pass this rank's part of the blocks of the whole weight to the layers."""
        rows_OB = blocks.rows_OB[self.shards[0].slice] if self.shards else blocks.rows_OB
        for shard in self._in:
            first, end = (
                number * rows_OB.shape[1] // shard.whole
                for number in (shard.start, shard.start + shard.size)
            )
            rows_OB = rows_OB[:, first:end]
        for layer, part in self.takers:
            layer.share_blocks(part, replace(blocks, rows_OB=rows_OB))

    @property
    def _in(self) -> tuple[Shard, ...]:
        return self.shards[1:]

    def check(self, shape: Collection[int], source: str) -> None:
        """Raise WeightError unless `shape` is the required shape; `source` names the file."""
        _check_shape(self, shape, source)


@dataclass(frozen=True, kw_only=True)
class MappedAssignment:
    """A checkpoint weight that fills several weights of the model, or that has a different layout.

    name: name in the checkpoint. parts: at least one target, in the order of output features.
    layout: the layout in the checkpoint.
    """

    name: str
    parts: tuple[Assignment, ...]
    layout: StoredLayout

    @property
    def target(self) -> torch.Tensor:
        """The first part's target. All parts have the dtype of this target."""
        return self.parts[0].target

    @property
    def shape(self) -> tuple[int, ...]:
        """The required shape of the checkpoint's weight."""
        num_rows = sum(part.shape[0] for part in self.parts)
        matrix = (num_rows, *self.parts[0].shape[1:])
        stacked = self.layout.stacked
        shape = (stacked, num_rows // stacked, *matrix[1:]) if stacked else matrix
        is_transposed = self._is_stored_transposed(shape)
        return (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape

    def fill(self, weight: torch.Tensor, *, is_mapped: bool = False) -> int:
        """Copy `weight` to the targets of its parts; see `Assignment.fill`."""
        stacked = self.layout.stacked
        rows = weight.mT if self._is_stored_transposed(weight.shape) else weight
        # A layer can borrow a weight only if its layout is that of the linear method.
        lends = is_mapped and replace(self.layout, stacked=0) == PLAIN
        rows = rows.flatten(0, 1) if stacked else rows
        return sum(
            part.fill(piece, is_mapped=lends)
            for part, piece in zip(self.parts, self.pieces(rows), strict=True)
        )

    def experts(self) -> Iterator[MappedAssignment]:
        """Yield the assignment of each stacked expert, whose weight is [1, …]."""
        num_parts = len(self.parts) // self.layout.stacked
        for first in range(0, len(self.parts), num_parts):
            parts = self.parts[first : first + num_parts]
            yield replace(self, parts=parts, layout=replace(self.layout, stacked=1))

    def pieces(self, rows: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the rows of each part, in the order of the model.

        rows: [O, ...]; values, or the bytes of quantized blocks.
        """
        groups = self.layout.groups
        if self.layout.rotary_pairs[1]:
            rows = split_rotary_pairs(rows, self.layout, self.parts[0].feature_dim)
        if groups == 1:
            return rows.split([part.shape[0] for part in self.parts])
        # The groups of stacked experts alternate within each expert.
        num_stacked = self.layout.stacked or 1
        num_parts = len(self.parts) // num_stacked
        sizes = [part.shape[0] // groups for part in self.parts[:num_parts]]
        return [
            piece.flatten(0, 1)
            for expert_rows in rows.chunk(num_stacked)
            for piece in expert_rows.unflatten(0, (groups, -1)).split(sizes, dim=1)
        ]

    def check(self, shape: Collection[int], source: str) -> None:
        """Raise WeightError unless `shape` is the required shape; `source` names the file."""
        _check_shape(self, shape, source)

    def _is_stored_transposed(self, shape: Collection[int]) -> bool:
        return self.layout.transposed and len(shape) == (3 if self.layout.stacked else 2)


Target = Assignment | MappedAssignment | ScaleAssignment
"""Where one weight of a checkpoint is stored."""


def _check_shape(
    assignment: Assignment | MappedAssignment, shape: Collection[int], source: str
) -> None:
    if tuple(shape) != assignment.shape:
        raise WeightError(
            f"{source}: weight {assignment.name} has the shape {list(shape)}, but config.json "
            f"requires {list(assignment.shape)}: config.json and the weights do not match"
        )


@dataclass(frozen=True, kw_only=True)
class WeightTable:
    """All assignments by the model's name, and the second names of shared weights.

    aliases: maps second names to first names, such as "model.embed_tokens.weight" for a tied
    "lm_head.weight". settled: names of weights that must not be read, because this rank already has
    them or only other ranks need them. names: the checkpoint's names of all weights. scales:
    targets of optional scales of the KV cache.
    """

    assignments: dict[str, Assignment]
    aliases: dict[str, str]
    settled: frozenset[str] = frozenset()
    names: WeightNames = field(default_factory=WeightNames)
    scales: dict[str, torch.Tensor] = field(default_factory=dict)

    def select(self, names: Collection[str], source: str) -> dict[str, Target]:
        """Return the assignments of those `names` that must be read; other names can be skipped.

        names: names in the checkpoint. The assignments fill every parameter exactly once. Raises
        WeightError, naming `source` and the first few names, for missing or unexpected
        weights.
        """
        chosen: dict[str, Target] = {}
        filled: set[str] = set()
        unexpected = []
        present = {own for name in names for own in self.names.to_model(name)[0]}
        for name in names:
            own, layout = self.names.to_model(name)
            first = tuple(self.aliases.get(item, item) for item in own)
            if self.settled.issuperset(first):
                continue  # the weight is already packed, or the model does not use it
            if not all(item in self.assignments for item in first) or filled.intersection(own):
                if is_kv_scale(own[0]):
                    chosen |= self._scale(name, own[0])
                elif not name.endswith(IGNORED_ENDINGS):
                    unexpected.append(name)
            elif first == own or not present.issuperset(first):
                parts = tuple(self.assignments[item] for item in first)
                plain = len(parts) == 1 and layout == PLAIN
                chosen[name] = (
                    replace(parts[0], name=name)
                    if plain
                    else MappedAssignment(name=name, parts=parts, layout=layout)
                )
                filled.update(first)
        missing = [self.names.to_checkpoint(x) for x in self.assignments if x not in filled]
        missing = list(dict.fromkeys(missing))
        if missing:
            raise WeightError(
                f"{source}: missing {_listed(missing)}. The checkpoint is incomplete, or "
                f"config.json describes another model{_hint(missing, unexpected)}"
            )
        if unexpected:
            raise WeightError(
                f"{source}: the model does not have {_listed(unexpected)}. config.json "
                "describes another model, or the checkpoint contains weights that this "
                f"architecture does not use{_hint(missing, unexpected)}"
            )
        return chosen

    def _scale(self, name: str, own: str) -> dict[str, Target]:
        """Return the assignment of a scale of the KV cache; {} if the model does not use it."""
        target = self.scales.get(normal_scale_name(own))
        return {} if target is None else {name: ScaleAssignment(name=name, target=target)}


def build_weight_table(
    model: nn.Module, mappings: Sequence[WeightMapping] | None = None
) -> WeightTable:
    """Return the table of all parameters and persistent buffers of `model`.

    mappings: the names and layouts of a format that differ from those of the modules. None:
    use the mappings that the model declares for its checkpoints.
    """
    layers = dict(model.named_modules(remove_duplicate=False))
    assignments: dict[str, Assignment] = {}
    aliases: dict[str, str] = {}
    settled = {
        f"{prefix}.{leaf}"
        for prefix, layer in layers.items()
        for leaf in getattr(layer, "elsewhere", ())
    }
    first_names: dict[int, str] = {}

    def is_settled(name: str) -> bool:
        prefix, _, leaf = name.rpartition(".")
        return leaf in getattr(layers[prefix], "settled", ())

    # Packed weights are handled last, because a weight that an unpacked layer also uses must be
    # read.
    state = model.state_dict(keep_vars=True)
    for name, tensor in sorted(state.items(), key=lambda item: is_settled(item[0])):
        prefix, _, leaf = name.rpartition(".")
        layer = layers[prefix]
        first_name = first_names.setdefault(id(tensor), name)
        if first_name != name:
            aliases[name] = first_name
            if first_name in assignments and not is_settled(name):
                assignments[first_name] = _shared(assignments[first_name], layer)
            continue
        parts = list(_parts(layer, prefix, leaf, tensor.detach()))
        if is_settled(name):
            settled.update(part.name for part in parts)
            continue
        borrows = leaf in getattr(layer, "borrows", ())
        for number, part in enumerate(parts):
            lend = partial(layer.borrow, number) if borrows else None
            is_linear = isinstance(layer, ParallelLinear) and leaf == "weight"
            takers = ((layer, number),) if is_linear else ()
            assignments[part.name] = replace(part, lend=lend, takers=takers, is_table=not is_linear)
    return WeightTable(
        assignments=assignments,
        aliases=aliases,
        settled=frozenset(settled),
        names=WeightNames.of(model) if mappings is None else WeightNames(mappings),
        scales=scale_targets(model),
    )


def _shared(assignment: Assignment, layer: nn.Module) -> Assignment:
    """Return the assignment of a weight that `layer` shares with a tied head or an embedding."""
    if isinstance(layer, ParallelLinear):
        return replace(assignment, takers=(*assignment.takers, (layer, 0)))
    return replace(assignment, is_table=True)


def _parts(layer: nn.Module, prefix: str, leaf: str, tensor: torch.Tensor) -> Iterator[Assignment]:
    """Yield the assignment of each part of one parameter, except for borrowed parts."""
    dot = "." if prefix else ""
    name = f"{prefix}{dot}{leaf}"
    if isinstance(layer, VocabParallelEmbedding):
        yield Assignment(name=name, target=tensor, shards=_sharded(layer.shard))
        return
    if isinstance(layer, CausalConv):
        pieces = tensor.split([shard.size for shard in layer.parts.values()])
        for (part, shard), rows in zip(layer.parts.items(), pieces, strict=True):
            own = f"{prefix}.{part}.{leaf}" if len(pieces) > 1 else name
            yield Assignment(name=own, target=rows, shards=_sharded(shard))
        return
    if not isinstance(layer, ParallelLinear):
        shard = getattr(layer, "shards", {}).get(leaf)
        yield Assignment(
            name=name,
            target=tensor,
            shards=_sharded(shard) if shard else (),
            feature_dim=tensor.ndim - 1,
            convert=getattr(layer, "converts", {}).get(leaf),
        )
        return
    parent, dot, _ = prefix.rpartition(".")
    shape, inputs = layer.shape, _input_shard(layer, tensor)
    is_fused = len(shape.part_names) > 1
    pieces = tensor.split(shape.part_sizes) if is_fused else (tensor,)
    for part, shard, rows in zip(shape.part_names, layer.part_shards, pieces, strict=True):
        yield Assignment(
            name=f"{parent}{dot}{part}.{leaf}" if is_fused else name,
            target=rows,
            shards=_sharded(shard, *inputs),
        )


def _input_shard(layer: ParallelLinear, tensor: torch.Tensor) -> tuple[Shard, ...]:
    """Return the rank's part of a parameter's second dimension, if the dimension is sharded.

    The dimension has input features or groups of input features; each rank has an equal part.
    """
    inputs = layer.in_shard
    if inputs.is_whole or tensor.ndim < 2:
        return ()
    size, num_ranks = tensor.shape[1], inputs.whole // inputs.size
    index = inputs.start // inputs.size
    return (Shard(start=index * size, size=size, whole=num_ranks * size),)


def _sharded(*shards: Shard) -> tuple[Shard, ...]:
    """Return the shards, or () if the rank has the whole weight."""
    return () if all(shard.is_whole for shard in shards) else shards


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:NUM_SHOWN])
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return f"{len(names)} weight{'s' if len(names) > 1 else ''} ({shown}{more})"


def _hint(missing: list[str], unexpected: list[str]) -> str:
    if quantized := [name for name in unexpected if name.endswith(QUANTIZED_ENDINGS)]:
        return f". {quantized[0]} needs quantization_config in config.json; it is missing or wrong"
    close = nearest(missing[0], unexpected) if missing else ""
    return f".{close}" if close else ""

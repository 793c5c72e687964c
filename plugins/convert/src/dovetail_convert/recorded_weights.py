"""Records the tensors that any weight loader writes to a model on the device "meta".

The contract of weight loaders says that `load` writes every parameter in place exactly once. Each
write is recorded instead of executed. When all parts of a Hugging Face checkpoint tensor have been
written, they are concatenated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.errors import WeightError
from dovetail.interfaces.weight_loader import WeightLoader
from dovetail_convert.shard_writer import PlannedTensor
from dovetail_torch.weights import Assignment, MappedAssignment, build_weight_table
from dovetail_torch.weights.checkpoint_layout import checkpoint_name, join_parts
from dovetail_torch.weights.finiteness import is_finite
from dovetail_torch.weights.weight_names import PLAIN, StoredLayout

Receive = Callable[[str, torch.Tensor], None]
"""Called with the name and the values of each checkpoint tensor."""


@dataclass(kw_only=True)
class _Joined:
    """A checkpoint tensor, and the weights of the model that are its parts.

    missing: the number of values that are not written yet.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[Assignment, ...]
    layout: StoredLayout
    missing: int
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].target.dtype

    def add(self, part: Assignment, start: int, values: torch.Tensor) -> torch.Tensor | None:
        """Add values of a part, in row-major order. Return the tensor if it is complete."""
        self.missing -= values.numel()
        if len(self.parts) == 1 and values.numel() == part.target.numel():
            return self._join([values.to(self.dtype).view(part.target.shape)])
        buffer = self.buffers.get(part.name)
        if buffer is None:
            buffer = torch.empty(part.target.shape, dtype=self.dtype)
            self.buffers[part.name] = buffer
        buffer.view(-1)[start : start + values.numel()] = values
        if self.missing:
            return None
        tensor = self._join([self.buffers[item.name] for item in self.parts])
        self.buffers.clear()
        return tensor

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return join_parts(parts, self.layout, self.parts[0].feature_dim)


@dataclass(frozen=True, kw_only=True)
class _Range:
    """The range of a storage that contains one weight of the model."""

    start: int
    part: Assignment
    owner: _Joined


class RecordedWeights:
    """The checkpoint tensors of a model on the device "meta".

    Raises WeightError, naming a weight, if the model's weight mappings cannot be inverted.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._joined = _tensors_of(model)
        self._ranges: dict[int, list[_Range]] = {}
        for joined in self._joined:
            for part in joined.parts:
                own = _Range(start=part.target.storage_offset(), part=part, owner=joined)
                self._ranges.setdefault(_storage(part.target), []).append(own)
        for ranges in self._ranges.values():
            ranges.sort(key=lambda item: item.start)

    def plan(self) -> list[PlannedTensor]:
        """Return the names, shapes and dtypes of the checkpoint tensors."""
        return [
            PlannedTensor(name=item.name, shape=item.shape, dtype=item.dtype)
            for item in self._joined
        ]

    def read(self, loader: WeightLoader, receive: Receive) -> None:
        """Call `loader.load`, and pass every complete tensor to `receive`.

        Raises WeightError, naming the weight, for values that are NaN or infinite in their dtype,
        and for tied weights that differ.
        """
        with _Recorder(self._record, receive):
            loader.load(self._model)
        known = {part.name for joined in self._joined for part in joined.parts}
        if untied := sorted(build_weight_table(self._model).assignments.keys() - known):
            raise WeightError(
                f"weight {untied[0]} is tied to another weight in config.json, but the two differ "
                "in the checkpoint: set tie_word_embeddings to false in config.json"
            )

    def _record(self, target: torch.Tensor, source: torch.Tensor, receive: Receive) -> bool:
        """Record a copy to `target`. Return False if `target` is not a weight of the model."""
        ranges = self._ranges.get(_storage(target))
        if ranges is None:
            return False
        start, end = target.storage_offset(), target.storage_offset() + target.numel()
        index = bisect_right(ranges, start, key=lambda item: item.start) - 1
        if not target.is_contiguous() or index < 0:
            raise WeightError(
                f"weight {ranges[max(0, index)].part.name} is written in a way that cannot be "
                "converted: its weight loader must write whole rows"
            )
        values = source.expand(target.shape).reshape(-1)
        for item in ranges[index:]:
            first, last = max(start, item.start), min(end, item.start + item.part.target.numel())
            if item.start >= end:
                break
            if first >= last:
                continue
            own = values[first - start : last - start]
            tensor = item.owner.add(item.part, first - item.start, own)
            if tensor is not None:
                _check_finite(item.owner.name, tensor)
                receive(item.owner.name, tensor)
        return True


class _Recorder(TorchDispatchMode):
    """A dispatch mode that passes the values of copies to "meta" tensors to a function.

    Source: the PyTorch documentation, "torch.utils._python_dispatch".
    """

    def __init__(
        self, record: Callable[[torch.Tensor, torch.Tensor, Receive], bool], receive: Receive
    ) -> None:
        super().__init__()
        self._record, self._receive = record, receive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = func is torch.ops.aten.copy_.default and args[0].is_meta and not args[1].is_meta
        if is_copy and self._record(args[0], args[1], self._receive):
            return args[0]
        return func(*args, **(kwargs or {}))


def _tensors_of(model: nn.Module) -> list[_Joined]:
    """Return the checkpoint tensors of a model, in the order of the model's weights."""
    table = build_weight_table(model)
    names = list(dict.fromkeys(checkpoint_name(table.names, own) for own in table.assignments))
    joined, used = [], set()
    for name in names:
        own, layout = table.names.to_model(name)
        first = tuple(table.aliases.get(item, item) for item in own)
        wrong = next((item for item in first if item not in table.assignments), None)
        if wrong is not None or used.intersection(first):
            raise WeightError(
                f"weight {name}: the weight_mappings of {type(model).__name__} cannot be inverted, "
                f"because this weight contains {wrong or first[0]}, which the model does not have "
                "or maps to another weight, too"
            )
        used.update(first)
        parts = tuple(table.assignments[item] for item in first)
        is_plain = len(parts) == 1 and layout == PLAIN
        whole = MappedAssignment(name=name, parts=parts, layout=layout)
        joined.append(
            _Joined(
                name=name,
                shape=parts[0].shape if is_plain else whole.shape,
                parts=parts,
                layout=layout,
                missing=sum(part.target.numel() for part in parts),
            )
        )
    return joined


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() and not is_finite(tensor):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise WeightError(
            f"weight {name} has values that are NaN or infinite in {dtype}: the checkpoint is "
            "damaged, or its values are outside of the range of the dtype; choose another dtype"
        )


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that identifies the storage of a meta tensor, whose data_ptr() is 0."""
    number: int = tensor.untyped_storage()._cdata
    return number

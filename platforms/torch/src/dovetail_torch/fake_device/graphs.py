"""Graphs of the fake device: recorded operations that are repeated in the same memory.

As on a device, a recorded operation is not executed: its results contain NaN, or 0 for integers,
until the first replay. Waits, allocations of pinned memory and copies between the host and the
device raise FlightError during a capture, because a replay would not repeat them. A replay reads
and writes the memory of the capture, whatever tensors the host uses now. Memory that was allocated
before the capture must still be allocated then: a device would have given its address to another
tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dovetail_torch.fake_device.device import DEVICE
from dovetail_torch.fake_device.memory import Piece

Account = Callable[[Sequence[Piece], Sequence[Piece]], object]
"""Records reads and writes of pieces of device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One recorded operation on host tensors. made: its new tensors.

    read, written: the device memory that it reads and writes. account: records these accesses.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    made: Sequence[torch.Tensor]
    read: Sequence[_Address]
    written: Sequence[_Address]
    account: Account

    def repeat(self) -> None:
        self.account([at.piece() for at in self.read], [at.piece() for at in self.written])
        result = self.func(*self.args, **self.kwargs)
        known = _storages((self.args, self.kwargs))
        new = [
            tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in known
        ]
        for own, new_tensor in zip(self.made, new, strict=True):
            own.copy_(new_tensor)


class _Address:
    """The address of a piece of memory in a graph.

    The graph keeps memory that was allocated during captures, and no other memory.
    """

    def __init__(self, piece: Piece) -> None:
        self._kept = piece if piece.is_pooled else None
        self._piece = weakref.ref(piece)

    def piece(self) -> Piece:
        """Return the piece. Record a fault if it was freed."""
        piece = self._piece()
        if piece is None:
            DEVICE.watch.fault(
                "a graph uses device memory that was freed after its capture; keep all tensors "
                "that a captured operation uses until the graph is freed."
            )
        return piece


class FakeGraph:
    """A graph with the interface of `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        """Start recording the operations of this thread. Raise RuntimeError if it is impossible."""
        if DEVICE.timeline.current is DEVICE.timeline.default:
            raise RuntimeError("a graph must be captured on a stream that is not the default")
        if DEVICE.watch.capturing is not None:
            raise RuntimeError("another graph is captured on this thread")
        DEVICE.watch.capturing = self

    def capture_end(self) -> None:
        """Stop recording."""
        DEVICE.watch.capturing = None

    def replay(self) -> None:
        """Repeat the recorded operations on the current stream."""
        if DEVICE.watch.capturing is not None:
            raise RuntimeError("a graph cannot be replayed during a capture")
        for operation in self._operations:
            operation.repeat()

    def record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: Sequence[torch.Tensor],
        pieces: tuple[Sequence[Piece], Sequence[Piece]],
        account: Account,
    ) -> Any:
        """Record an operation on host tensors, and return its result without its values.

        written: the tensors among the arguments that it writes to; they do not change now. pieces:
        the device memory that it reads and that it writes.
        """
        clones = {id(item): item.clone() for item in written}
        result = func(*_replaced(args, clones), **_replaced(kwargs, clones))
        result = _replaced(result, {id(clones[id(item)]): item for item in written})
        known = _storages((args, kwargs))
        created = [
            tensor for tensor in _tensors(result) if tensor.untyped_storage()._cdata not in known
        ]
        for item in created:
            item.fill_(torch.nan if item.is_floating_point() else 0)
        if created or written:
            read_at, written_at = (list(map(_Address, group)) for group in pieces)
            self._operations.append(
                _Operation(
                    func=func,
                    args=args,
                    kwargs=kwargs,
                    made=created,
                    read=read_at,
                    written=written_at,
                    account=account,
                )
            )
        return result


def _replaced(value: Any, by_id: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return by_id.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, by_id) for item in value)
    if isinstance(value, Mapping):
        return {name: _replaced(item, by_id) for name, item in value.items()}
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, Mapping):
        return _tensors(list(value.values()))
    return []


def _storages(value: Any) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in _tensors(value)}

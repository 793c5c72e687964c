"""The memory of a fake device: allocation, and which streams still read and write it.

Bytes are counted as in a caching allocator: freed memory stays reserved until `empty_cache`. Each
piece stores its last write, and its last read from each stream. A use that is not ordered after
these uses is a fault, and so is freeing a piece too early.
"""

from __future__ import annotations

from collections import deque

import torch

from dovetail_torch.fake_device.timeline import Place, Stream, Timeline
from dovetail_torch.fake_device.watch import Watch

_GRAIN = 512
"""Allocations are multiples of this number of bytes."""


class Piece:
    """A piece of device memory, shared by tensors that are views of it. Freed with the last view.

    owner: the stream on which it was allocated, which may reuse it. is_mapped: whether it has
    memory; only regions of virtual memory may have none. is_pooled: whether it was allocated during
    a capture, from the memory of graphs, which is kept after the tensor is freed.
    """

    __slots__ = (
        "__weakref__",
        "is_mapped",
        "is_pooled",
        "memory",
        "num_bytes",
        "owner",
        "reads",
        "written",
    )

    def __init__(self, memory: Memory, num_bytes: int, owner: Stream) -> None:
        self.memory = memory
        self.num_bytes = num_bytes
        self.owner = owner
        self.is_mapped = True
        self.is_pooled = False
        self.written: Place | None = None
        self.reads: dict[int, Place] = {}

    def uses(self) -> list[tuple[str, Place]]:
        """Return the last write and all later reads."""
        written = [] if self.written is None else [("writes", self.written)]
        return written + [("reads", moment) for moment in self.reads.values()]

    def __del__(self) -> None:
        self.memory.give_back(self)


class Memory:
    """All memory of a device.

    total_bytes: size of the device's memory. outside_bytes: bytes used by other processes or
    libraries. mapped_bytes: bytes of regions of virtual memory. The other counts are those of
    torch: bytes allocated to tensors, bytes reserved from the device, peak of allocated bytes.
    """

    def __init__(self, timeline: Timeline, watch: Watch, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.outside_bytes = 0
        self.mapped_bytes = 0
        self.reserved_bytes = 0
        self.peak_bytes = 0
        self._allocated_bytes = 0
        self._timeline = timeline
        self._watch = watch
        # Python may free a piece at any time, also during a method of this class.
        self._returned: deque[int] = deque()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors."""
        while self._returned:
            self._allocated_bytes -= self._returned.popleft()
        return self._allocated_bytes

    @property
    def free_bytes(self) -> int:
        """Number of free bytes that the device would report."""
        used = self.outside_bytes + self.mapped_bytes + self.reserved_bytes
        return max(0, self.total_bytes - used)

    def require(self, num_bytes: int) -> None:
        """Raise torch.OutOfMemoryError if `num_bytes` are not available."""
        total = self.allocated_bytes + num_bytes
        if total > self.total_bytes - self.outside_bytes - self.mapped_bytes:
            raise torch.OutOfMemoryError(
                f"Fake device out of memory. Tried to allocate {num_bytes} bytes. It has "
                f"{self.total_bytes} bytes, of which {self._allocated_bytes} are "
                f"allocated, {self.mapped_bytes} are mapped, and {self.outside_bytes} are used by "
                "other processes."
            )

    def take(self, num_bytes: int) -> Piece:
        """Return a new piece, or raise torch.OutOfMemoryError."""
        num_bytes = -(-num_bytes // _GRAIN) * _GRAIN
        with self._timeline.lock:
            self.require(num_bytes)
            self._allocated_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self._allocated_bytes)
            self.reserved_bytes = max(self.reserved_bytes, self._allocated_bytes)
            piece = Piece(self, num_bytes, self._timeline.current)
            piece.is_pooled = self._watch.capturing is not None
            return piece

    def give_back(self, piece: Piece) -> None:
        """Free a piece. Record a fault if a stream other than its owner still uses it."""
        self._returned.append(piece.num_bytes)
        for use, moment in piece.uses():
            if not self._timeline.is_before(moment, piece.owner):
                self._watch.note(
                    f"{piece.num_bytes} bytes of device memory were freed while stream "
                    f"{moment.stream} still {use} them; keep the tensor until its event is "
                    "complete."
                )

    def read(self, piece: Piece, stream: Stream, moment: Place) -> None:
        """Record a read. Raise FlightError if it is not ordered after the last write."""
        self._check_mapped(piece)
        written = piece.written
        if written is not None and not self._timeline.is_before(written, stream):
            self._watch.fault(
                f"stream {moment.stream} reads device memory to which stream {written.stream} may "
                "not have written yet; make the reading stream wait for the other stream."
            )
        piece.reads[moment.stream] = moment

    def write(self, piece: Piece, stream: Stream, moment: Place) -> None:
        """Record a write. Raise FlightError if it is not ordered after all earlier uses."""
        self._check_mapped(piece)
        for use, other in piece.uses():
            if not self._timeline.is_before(other, stream):
                self._watch.fault(
                    f"stream {moment.stream} writes to device memory that stream {other.stream} "
                    f"still {use}; wait for the event of that use first, or write to other memory."
                )
        piece.written = moment
        piece.reads.clear()

    def _check_mapped(self, piece: Piece) -> None:
        if not piece.is_mapped:
            self._watch.fault("device memory is used that is not mapped; wake the worker up first.")

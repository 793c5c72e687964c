"""The shared memory of a ring: its layout, its counters, and frames in its slots.

    page 0            magic, layout version, number of slots, bytes per slot, number of readers
    one line each     the writer's counter and the count it waits for; the same for each reader
    slots             number, size, flags, checksum, then the frame

The memory has no name, so the operating system releases it when the last process exits. A counter
has one writer and fills a cache line. This module does not wait, use sockets or interpret frames.
Every number that another process wrote is checked. A slot contains its frame's number and a
checksum, so that an incomplete frame (processors that reorder stores) or an overwritten one is
recognized.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from struct import Struct
from zlib import crc32

from dovetail.errors import CapacityError, MessageError

MAX_READERS = 256
MAX_SLOTS = 1024
MAX_SLOT_BYTES = 1 << 30
_MAGIC = 0x44565247  # written in native byte order, so another byte order is detected
_LAYOUT = 1
_HEADER = Struct("=IIIII")
_SLOT = Struct("=QIIII")
_SLOT_HEAD_BYTES = 32
_PAGE_BYTES = 4096
_LINE_WORDS = 8
_LINE_BYTES = 8 * _LINE_WORDS
_OVERFLOW = 1


@dataclass(frozen=True, kw_only=True)
class RingShape:
    """The size of a ring.

    num_slots: maximum number of unread frames. slot_bytes: the longest frame that is sent through
    memory; longer frames are sent by descriptor. Raises ValueError if a value is below 1 or above
    its maximum.
    """

    num_readers: int
    num_slots: int = 16
    slot_bytes: int = 1 << 16

    def __post_init__(self) -> None:
        for name, value, maximum in (
            ("num_readers", self.num_readers, MAX_READERS),
            ("num_slots", self.num_slots, MAX_SLOTS),
            ("slot_bytes", self.slot_bytes, MAX_SLOT_BYTES),
        ):
            if not 1 <= value <= maximum:
                raise ValueError(f"{name}={value} must be between 1 and {maximum}")

    @property
    def first_slot(self) -> int:
        """Offset of the first slot, in bytes."""
        lines = _PAGE_BYTES + _LINE_BYTES * (1 + self.num_readers)
        return -(-lines // _PAGE_BYTES) * _PAGE_BYTES

    @property
    def stride(self) -> int:
        """Distance from one slot to the next, in bytes."""
        return -(-(_SLOT_HEAD_BYTES + self.slot_bytes) // _LINE_BYTES) * _LINE_BYTES

    @property
    def num_bytes(self) -> int:
        """Size of the whole memory in bytes."""
        return self.first_slot + self.stride * self.num_slots


@dataclass(frozen=True, slots=True)
class Frame:
    """The content of a slot. content: a copy, or None for a frame that is sent by descriptor."""

    size: int
    checksum: int
    content: bytes | None


def anonymous_file(num_bytes: int) -> int:
    """Return the descriptor of new shared memory without a name. The caller closes it.

    Raises CapacityError if the system's limits do not allow the allocation.
    """
    try:
        descriptor = _unnamed_file()
        try:
            os.ftruncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise CapacityError(
            f"{num_bytes} bytes of shared memory cannot be allocated ({error}). Free memory, or "
            "raise the limits on file size and open files (ulimit -f, ulimit -n)."
        ) from error
    return descriptor


def memory_of(content: bytes) -> int:
    """Return the descriptor of new shared memory with `content`. The caller closes it.

    Raises CapacityError if the system's limits do not allow the allocation.
    """
    descriptor = anonymous_file(len(content))
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(descriptor, left) :]
        os.lseek(descriptor, 0, os.SEEK_SET)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_memory(descriptor: int, size: int) -> bytes:
    """Return the first `size` bytes of shared memory, or all if it is shorter."""
    parts, at = [], 0
    while at < size and (part := os.pread(descriptor, size - at, at)):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dovetail")
    import tempfile  # importing it takes several milliseconds

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class RingMemory:
    """One process's view of a ring's memory. `who` is 0 for the writer, 1 + i for reader i.

    Does not own the descriptor. `close` unmaps the memory and may be called twice.
    """

    def __init__(self, shape: RingShape, mapping: mmap.mmap) -> None:
        self.shape = shape
        self._mapping = mapping
        self._bytes = memoryview(mapping)
        lines = self._bytes[_PAGE_BYTES : _PAGE_BYTES + _LINE_BYTES * (1 + shape.num_readers)]
        self._words = lines.cast("Q")
        self._slots = [shape.first_slot + shape.stride * index for index in range(shape.num_slots)]

    @classmethod
    def format(cls, descriptor: int, shape: RingShape) -> RingMemory:
        """Write the header of a new ring into `descriptor`, which must be zeroed and big enough."""
        mapping = mmap.mmap(descriptor, shape.num_bytes)
        counts = shape.num_slots, shape.slot_bytes, shape.num_readers
        _HEADER.pack_into(mapping, 0, _MAGIC, _LAYOUT, *counts)
        return cls(shape, mapping)

    @classmethod
    def attach(cls, descriptor: int) -> RingMemory:
        """Map a ring that another process has created. Raise MessageError if it is not a ring."""
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            raise MessageError(f"the shared memory has {size} bytes and is too small for a ring.")
        magic, layout, num_slots, slot_bytes, num_readers = _HEADER.unpack(header)
        if magic != _MAGIC or layout != _LAYOUT:
            raise MessageError(
                f"the shared memory begins with {magic:#x} and layout {layout} instead of "
                f"{_MAGIC:#x} and {_LAYOUT}: it is not a ring of this version and byte order."
            )
        try:
            shape = RingShape(num_readers=num_readers, num_slots=num_slots, slot_bytes=slot_bytes)
        except ValueError as error:
            raise MessageError(f"the ring's header is invalid: {error}.") from None
        if size < shape.num_bytes:
            raise MessageError(
                f"the ring has {size} bytes, but its header states {shape.num_bytes}."
            )
        return cls(shape, mmap.mmap(descriptor, shape.num_bytes))

    def count(self, side: int) -> int:
        """Return how many frames the writer has written, or a reader has read."""
        return self._words[side * _LINE_WORDS]

    def set_count(self, side: int, count: int) -> None:
        """Publish this process's count.

        A process that reads the count also sees all earlier stores.
        """
        self._words[side * _LINE_WORDS] = count

    def wake_count(self, side: int) -> int:
        """Return the count at which `side` must be woken, or 0 if it is awake."""
        return self._words[side * _LINE_WORDS + 1]

    def set_wake_count(self, side: int, count: int) -> None:
        """Set the frame count at which the other process must wake `side`; 0 disables wakeups."""
        self._words[side * _LINE_WORDS + 1] = count

    def write(self, number: int, content: bytes) -> None:
        """Write frame `number` into its slot. `content` must fit."""
        at = self._slots[number % self.shape.num_slots]
        begin = at + _SLOT_HEAD_BYTES
        self._bytes[begin : begin + len(content)] = content
        _SLOT.pack_into(self._mapping, at, number, len(content), 0, crc32(content), 0)

    def write_overflow(self, number: int, size: int, checksum: int) -> None:
        """Record in the slot of frame `number` that it is sent by descriptor."""
        at = self._slots[number % self.shape.num_slots]
        _SLOT.pack_into(self._mapping, at, number, size, _OVERFLOW, checksum, 0)

    def read(self, number: int) -> Frame | None:
        """Return frame `number`, or None if its slot does not contain it completely."""
        at = self._slots[number % self.shape.num_slots]
        actual, size, flags, checksum, _ = _SLOT.unpack_from(self._mapping, at)
        if actual != number:
            return None
        if flags == _OVERFLOW:
            return Frame(size, checksum, None)
        if flags or size > self.shape.slot_bytes:
            return None
        begin = at + _SLOT_HEAD_BYTES
        content = bytes(self._bytes[begin : begin + size])
        return Frame(size, checksum, content) if crc32(content) == checksum else None

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._bytes.release()
        self._mapping.close()

"""A broadcast ring: one process writes frames, and several others read. Each reads every frame.

Frames are bytes, whose format `columns` defines. They are sent through shared memory; a frame
longer than a slot is sent as a memory file instead, by its descriptor. A send has a timeout, and
the exit of the other process is detected by its closed wakeup socket. Waiting spins briefly, then
sleeps until the wakeup socket has a packet.

Pass a `RingReaderEnd` to a process that is started with exec (`pass_fds`), and close it in this
process: the socket reports the exit of the other process only if no third process has its
descriptor. Not thread-safe.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from zlib import crc32

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import MessageError, PeerLostError, TransportError
from dovetail.faults import fault
from dovetail.transport.packets import packet_pair
from dovetail.transport.ring_memory import (
    RingMemory,
    RingShape,
    anonymous_file,
    memory_of,
    read_memory,
)
from dovetail.transport.wakeup_socket import WakeupPoller, WakeupSocket

MAX_FRAME_BYTES = 1 << 30
SEND_TIMEOUT_S = 10.0
NUM_SPINS = 100
_NAP_MS = 20
"""A waiting process reads the counters at least this often, in case a wakeup was lost."""
_NUM_LOOKS = 20


@dataclass(frozen=True, kw_only=True)
class _RingEnd:
    """One end of a ring, a reader or the writer: the descriptors that a process needs to use it.

    descriptors: descriptors of the memory and of the wakeup sockets, owned by this object. They
    have the same numbers in a child process to which they are passed.
    """

    descriptors: tuple[int, ...]

    def close(self) -> None:
        """Close the descriptors in this process. Call it once another process has them."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def _attach(self) -> tuple[RingMemory, list[WakeupSocket]]:
        """Map the memory and open the wakeup sockets. Both now own the descriptors."""
        memory_file, *wakeup_files = self.descriptors
        try:
            memory = RingMemory.attach(memory_file)
        except BaseException:
            self.close()
            raise
        os.close(memory_file)
        return memory, [
            WakeupSocket(socket.socket(fileno=wakeup_file)) for wakeup_file in wakeup_files
        ]


@dataclass(frozen=True, kw_only=True)
class RingReaderEnd(_RingEnd):
    """The descriptors that a reader of a ring needs. index: the reader's index."""

    index: int

    def take(self, *, clock: Clock | None = None, num_spins: int = NUM_SPINS) -> RingReader:
        """Return the reader, which now owns the descriptors. They are closed if this raises."""
        memory, (wakeup,) = self._attach()
        if not 0 <= self.index < memory.shape.num_readers:
            memory.close()
            wakeup.close()
            raise MessageError(
                f"reader {self.index} does not exist; there are {memory.shape.num_readers}."
            )
        return RingReader(memory, wakeup, self.index, clock=clock, num_spins=num_spins)


@dataclass(frozen=True, kw_only=True)
class RingWriterEnd(_RingEnd):
    """The descriptors that the writer of a ring needs, with a wakeup socket for each reader."""

    def take(self, *, clock: Clock | None = None) -> RingWriter:
        """Return the writer, which now owns the descriptors. They are closed if this raises."""
        memory, wakeups = self._attach()
        return RingWriter(memory, wakeups, clock=clock)


def make_ring_ends(shape: RingShape) -> tuple[RingWriterEnd, tuple[RingReaderEnd, ...]]:
    """Create a ring. Return the descriptors of the writer and of each reader."""
    fault("ring.make")
    with ExitStack() as undo:
        memory_file = anonymous_file(shape.num_bytes)
        undo.callback(os.close, memory_file)
        RingMemory.format(memory_file, shape).close()
        wakeups, ends = [], []
        for index in range(shape.num_readers):
            pair = packet_pair()
            writer_end, reader_end, memory_copy = (
                pair[0].detach(),
                pair[1].detach(),
                os.dup(memory_file),
            )
            for descriptor in (writer_end, reader_end, memory_copy):
                undo.callback(os.close, descriptor)
            wakeups.append(writer_end)
            ends.append(RingReaderEnd(index=index, descriptors=(memory_copy, reader_end)))
        undo.pop_all()
    return RingWriterEnd(descriptors=(memory_file, *wakeups)), tuple(ends)


def make_ring(
    shape: RingShape, *, clock: Clock | None = None
) -> tuple[RingWriter, tuple[RingReaderEnd, ...]]:
    """Create a ring. Return its writer, and the descriptors of each reader."""
    writer_end, reader_ends = make_ring_ends(shape)
    return writer_end.take(clock=clock), reader_ends


class RingWriter:
    """The writer of a ring. Use it as a context manager, or call `close`."""

    def __init__(
        self, memory: RingMemory, wakeups: Sequence[WakeupSocket], *, clock: Clock | None = None
    ) -> None:
        """Take over the memory and wakeup sockets. Use `make_ring` to create a writer."""
        self._memory = memory
        self._wakeups = wakeups
        self._poller = WakeupPoller(wakeups)
        self._clock: Clock = clock or MonotonicClock()
        self._num_slots = memory.shape.num_slots
        self._written = 0
        self._slowest = 0
        self._rung = [0] * len(wakeups)
        self._broken = ""

    def send(self, frame: bytes, *, timeout_s: float = SEND_TIMEOUT_S) -> None:
        """Send `frame` to every reader. Wait for a free slot, at most `timeout_s` seconds.

        Raises TimeoutError with the number of unread frames if no slot became free; PeerLostError
        if a reader has exited; ValueError if the frame is longer than MAX_FRAME_BYTES. After a
        PeerLostError, or if a long frame reached only some readers, every later call raises.
        """
        if self._broken:
            raise TransportError(f"the ring is broken: {self._broken}")
        fault("ring.send")
        deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        if self._written - self._slowest >= self._num_slots:
            self._wait_for_room(deadline_ns)
        number = self._written + 1
        if len(frame) <= self._memory.shape.slot_bytes:
            self._memory.write(number, frame)
        else:
            self._send_around(number, frame, deadline_ns)
        self._written = number
        self._memory.set_count(0, number)
        for index, wakeup in enumerate(self._wakeups):
            wake_count = self._memory.wake_count(1 + index)
            if wake_count and wake_count != self._rung[index]:
                self._rung[index] = wake_count
                wakeup.notify()
                if wakeup.lost:
                    raise self._reader_lost()

    def check_readers(self) -> None:
        """Raise PeerLostError if a reader has exited. Does not wait."""
        self._poller.wait(0)
        if any(wakeup.lost for wakeup in self._wakeups):
            raise self._reader_lost()

    def num_unread(self) -> tuple[int, ...]:
        """Return how many frames each reader has not read yet."""
        return tuple(self._written - count for count in self._counts())

    def close(self) -> None:
        """Close the writer. Readers get the remaining frames, then PeerLostError.

        May be called twice.
        """
        if self._broken != "this process has closed the ring.":
            self._broken = "this process has closed the ring."
            self._memory.close()
            for wakeup in self._wakeups:
                wakeup.close()

    def __enter__(self) -> RingWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _counts(self) -> list[int]:
        counts = [self._memory.count(1 + index) for index in range(len(self._wakeups))]
        for index, count in enumerate(counts):
            if not self._written - self._num_slots <= count <= self._written:
                self._broken = (
                    f"reader {index} reports that it read {count} frames, but "
                    f"{self._written} were written."
                )
                raise MessageError(self._broken)
        return counts

    def _wait_for_room(self, deadline_ns: int) -> None:
        # Wake at half of the slots, not at the first free one: fewer wakeups per frame.
        target = self._written - self._num_slots // 2
        self._slowest = min(self._counts())
        while self._written - self._slowest >= self._num_slots:
            self._memory.set_wake_count(0, target)
            self._slowest = min(self._counts())
            if self._written - self._slowest >= self._num_slots:
                self._nap(deadline_ns)
            self._slowest = min(self._counts())
        self._memory.set_wake_count(0, 0)

    def _nap(self, deadline_ns: int) -> None:
        left_ms = (deadline_ns - self._clock.now_ns()) // 1_000_000
        if left_ms <= 0:
            raise TimeoutError(
                f"readers have {self.num_unread()} unread frames; the ring has "
                f"{self._num_slots} slots."
            )
        self._poller.wait(min(left_ms, _NAP_MS))
        if any(wakeup.lost for wakeup in self._wakeups):
            raise self._reader_lost()

    def _send_around(self, number: int, frame: bytes, deadline_ns: int) -> None:
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame has {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}.")
        descriptor = memory_of(frame)
        try:
            self._broken = f"frame {number} reached only some of the readers."
            for wakeup in self._wakeups:
                while not wakeup.send_descriptor(number, descriptor):
                    self._nap(deadline_ns)
            self._broken = ""
        finally:
            os.close(descriptor)
        self._memory.write_overflow(number, len(frame), crc32(frame))

    def _reader_lost(self) -> PeerLostError:
        lost = [index for index, wakeup in enumerate(self._wakeups) if wakeup.lost]
        self._broken = f"reader {lost} has exited; restart its process with a new ring."
        return PeerLostError(self._broken)


class RingReader:
    """A reader of a ring. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        memory: RingMemory,
        wakeup: WakeupSocket,
        index: int,
        *,
        clock: Clock | None = None,
        num_spins: int = NUM_SPINS,
    ) -> None:
        """Take over the memory and wakeup socket. Use `RingReaderEnd.take` to create a reader.

        num_spins: reads of the counter (0.1 µs each) before sleeping.
        """
        self._memory = memory
        self._wakeup = wakeup
        self._who = 1 + index
        self._poller = WakeupPoller([wakeup])
        self._clock: Clock = clock or MonotonicClock()
        self._num_spins = num_spins
        self._read = 0
        self._rung = 0
        self._closed = False

    def receive(self, *, timeout_s: float | None = None) -> bytes:
        """Return a copy of the next frame. Wait for it, at most `timeout_s` seconds.

        timeout_s: None to wait until the writer exits. Raises TimeoutError if no frame arrives in
        this time; PeerLostError if the writer has exited and all its frames were read; MessageError
        if the next slot does not contain a complete frame: the ring is then unusable.
        """
        if self._closed:
            raise TransportError("this reader is closed.")
        fault("ring.receive")
        count, read = self._memory.count, self._read
        for _ in range(self._num_spins):
            if count(0) != read:
                return self._take()
        self._sleep(timeout_s)
        return self._take()

    def close(self) -> None:
        """Close the reader. The writer's next send raises PeerLostError. May be called twice."""
        if not self._closed:
            self._closed = True
            self._memory.close()
            self._wakeup.close()

    def __enter__(self) -> RingReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _sleep(self, timeout_s: float | None) -> None:
        """Wait until a frame is available."""
        start_ns = self._clock.now_ns()
        memory, read = self._memory, self._read
        memory.set_wake_count(self._who, read + 1)
        while memory.count(0) == read:
            nap_ms = _NAP_MS
            if timeout_s is not None:
                left_s = timeout_s - (self._clock.now_ns() - start_ns) / 1e9
                if left_s <= 0:
                    raise TimeoutError(f"no frame arrived within {timeout_s} s.")
                nap_ms = min(nap_ms, 1 + int(left_s * 1000))
            self._poller.wait(nap_ms)
            if self._wakeup.lost and memory.count(0) == read:
                raise PeerLostError("the ring's writer has exited, and all its frames were read.")
        memory.set_wake_count(self._who, 0)

    def _take(self) -> bytes:
        number, written = self._read + 1, self._memory.count(0)
        if not number <= written < number + self._memory.shape.num_slots:
            raise MessageError(
                f"the ring is corrupt: the writer's frame count is {written}, but the next frame "
                f"is {number}."
            )
        frame = self._memory.read(number)
        for _ in range(_NUM_LOOKS):
            if frame is not None:
                break
            self._poller.wait(1)  # stores of another processor may arrive late
            frame = self._memory.read(number)
        if frame is None:
            raise MessageError(f"frame {number} is not in its slot, or incomplete.")
        content = frame.content
        if content is None:
            content = self._take_descriptor(number, frame.size, frame.checksum)
        self._read = number
        self._memory.set_count(self._who, number)
        wake_count = self._memory.wake_count(0)
        if 0 < wake_count <= number and wake_count != self._rung:
            self._rung = wake_count
            self._wakeup.notify()
        return content

    def _take_descriptor(self, number: int, size: int, checksum: int) -> bytes:
        """Return the content of a long frame, whose descriptor was sent over the wakeup socket."""
        self._wakeup.receive()
        descriptor = self._wakeup.descriptors.pop(number, None)
        if descriptor is None:
            raise MessageError(f"the descriptor of frame {number} has not arrived.")
        try:
            actual_size = os.fstat(descriptor).st_size
            if actual_size != size or size > MAX_FRAME_BYTES:
                raise MessageError(f"frame {number} has {actual_size} bytes instead of {size}.")
            content = read_memory(descriptor, size)
        finally:
            os.close(descriptor)
        if crc32(content) != checksum:
            raise MessageError(f"frame {number} is corrupt: its checksum differs.")
        return content

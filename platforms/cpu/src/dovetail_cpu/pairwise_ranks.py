"""Collective operations on one machine: each pair of ranks exchanges tensors, and each rank adds.

An all-reduce takes one message in each direction instead of the rounds of a ring. Latency matters,
because the tensors of a step are small. Each rank adds in rank order, so the result is bitwise
equal on all ranks, at any offset of a tensor. Each rank sends (size - 1) tensors, more than in a
ring if there are more than two ranks. Each pair has a unix socket (`rank_sockets`); tensors larger
than its buffer use shared memory (`rank_memory`). This module implements
`dovetail.interfaces.RankGroup`.
"""

from __future__ import annotations

import ctypes
import mmap
import select
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from struct import Struct

import torch

from dovetail.clock import MonotonicClock
from dovetail.errors import PeerLostError
from dovetail.processes.ownership import finalize_in_owner
from dovetail_cpu.rank_memory import SLOT_BYTES

_HEADER = Struct("=Q")
_SIZE = Struct("=Q")
"""Format of the message that announces the size of a tensor in shared memory."""

_SHARED_BYTES = 64 << 10
"""Tensors of at least this size use shared memory, up to the size of a slot."""

_NUM_SPINS = 30
"""Number of polls of the sockets before sleeping."""

Buffers = list[memoryview]


class PairwiseRanks:
    """One rank of several. batch_invariant: all-reduces are bitwise equal in every batch."""

    def __init__(
        self,
        ends: Mapping[int, socket.socket],
        memory: Sequence[mmap.mmap],
        *,
        rank: int,
        timeout: timedelta,
    ) -> None:
        """ends: a connected non-blocking socket to each other rank. Owned by this group.

        memory: two slots of each rank. timeout: maximum duration of a collective operation.
        """
        self.rank = rank
        self.size = len(ends) + 1
        self.batch_invariant = True
        self._ends = dict(ends)
        self._memory = [torch.frombuffer(item, dtype=torch.uint8) for item in memory]
        self._slot = 0
        self._timeout_ns = int(timeout.total_seconds() * 1e9)
        self._clock = MonotonicClock()
        self.close = finalize_in_owner(self, _close_all, list(ends.values()))

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, a new tensor."""
        first, second, *others = self._exchange(x)
        total = first + second
        for part in others:
            total += part
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors concatenated along the last dimension, a new tensor."""
        return torch.cat(self._exchange(x), dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, in the memory of `x` if it is contiguous."""
        x = x.contiguous()
        view = _bytes_of(x)
        if self.rank == 0:
            self._move({other: view for other in self._ends}, {})
        else:
            self._move({}, {0: view})
        return x

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in rank order.

        They remain valid until two more collective operations have started.
        """
        x = x.contiguous()
        if _SHARED_BYTES <= x.nbytes <= SLOT_BYTES:
            return self._exchange_in_memory(x)
        parts = [x if rank == self.rank else torch.empty_like(x) for rank in range(self.size)]
        own = _bytes_of(x)
        self._move(
            dict.fromkeys(self._ends, own),
            {other: _bytes_of(parts[other]) for other in self._ends},
        )
        return parts

    def _exchange_in_memory(self, x: torch.Tensor) -> list[torch.Tensor]:
        start = self._slot * SLOT_BYTES
        self._slot = 1 - self._slot
        slots = [memory[start : start + x.nbytes] for memory in self._memory]
        parts = [slot.view(x.dtype).view(x.shape) for slot in slots]
        parts[self.rank].copy_(x)
        own_size = _SIZE.pack(x.nbytes)
        buffers = {other: bytearray(_SIZE.size) for other in self._ends}
        self._move(
            dict.fromkeys(self._ends, memoryview(own_size)),
            {other: memoryview(buffer) for other, buffer in buffers.items()},
        )
        for other, buffer in buffers.items():
            if buffer != own_size:
                raise PeerLostError(
                    f"rank {other} of {self.size} sent a tensor of {_SIZE.unpack(buffer)[0]} "
                    f"bytes, but rank {self.rank} sent {x.nbytes} bytes: the ranks do not run the "
                    "same step."
                )
        parts[self.rank] = x
        return parts

    def _move(self, out: Mapping[int, memoryview], into: Mapping[int, memoryview]) -> None:
        """Send and receive these buffers. Raise PeerLostError if a rank does not respond."""
        moves: list[_Sending | _Receiving] = [
            _Sending(self._ends[other], view) for other, view in out.items()
        ]
        moves += [_Receiving(self._ends[other], view) for other, view in into.items()]
        try:
            for _ in range(_NUM_SPINS):
                moves = [move for move in moves if not move.proceed()]
                if not moves:
                    return
            self._wait_for(moves)
        except (OSError, RuntimeError) as error:
            raise PeerLostError(
                f"rank {self.rank} of {self.size} cannot run collective operations with other "
                f"ranks ({error}): one of them has exited or hangs; see its log."
            ) from error

    def _wait_for(self, moves: list[_Sending | _Receiving]) -> None:
        deadline_ns = self._clock.now_ns() + self._timeout_ns
        while moves:
            left_ms = (deadline_ns - self._clock.now_ns()) / 1e6
            if left_ms <= 0:
                raise TimeoutError(f"no data was received within {self._timeout_ns / 1e9:g} s")
            poll = select.poll()
            events: dict[int, int] = {}
            for move in moves:
                events[move.end.fileno()] = events.get(move.end.fileno(), 0) | move.event
            for descriptor, event in events.items():
                poll.register(descriptor, event)
            poll.poll(left_ms)
            moves = [move for move in moves if not move.proceed()]


class _Sending:
    """A tensor that is being sent to a rank, after its size."""

    event = select.POLLOUT

    def __init__(self, end: socket.socket, content: memoryview) -> None:
        self.end = end
        self._left: Buffers = [memoryview(_HEADER.pack(len(content))), content]

    def proceed(self) -> bool:
        """Send as many bytes as the socket accepts. Return whether all were sent."""
        try:
            sent = self.end.sendmsg(self._left)
        except BlockingIOError:
            return False
        self._left = _without(self._left, sent)
        return not self._left


class _Receiving:
    """A tensor that is being received from a rank."""

    event = select.POLLIN

    def __init__(self, end: socket.socket, content: memoryview) -> None:
        self.end = end
        self._num_bytes = len(content)
        self._header = bytearray(_HEADER.size)
        self._left: Buffers = [memoryview(self._header), content]
        self._is_checked = False

    def proceed(self) -> bool:
        """Receive the available bytes. Return whether the tensor is complete."""
        try:
            received = self.end.recvmsg_into(self._left)[0]
        except BlockingIOError:
            return False
        if not received:
            raise RuntimeError("another rank closed its connection")
        self._left = _without(self._left, received)
        if not self._is_checked and len(self._left) < 2:
            self._check()
        return not self._left

    def _check(self) -> None:
        self._is_checked = True
        (peer_size,) = _HEADER.unpack(self._header)
        if peer_size != self._num_bytes:
            raise RuntimeError(f"received {peer_size} bytes, expected {self._num_bytes}")


def _without(buffers: Buffers, count: int) -> Buffers:
    """Return the buffers without their first `count` bytes."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _bytes_of(x: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor, which must outlive the view."""
    array = (ctypes.c_char * x.nbytes).from_address(x.data_ptr())
    return memoryview(array).cast("B")


def _close_all(ends: Iterable[socket.socket]) -> None:
    for end in ends:
        end.close()

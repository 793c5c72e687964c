"""Memory for the activations of a recorded step, at the same addresses in every replay.

All recorded steps share one arena, because only one is active at a time. While a step is recorded,
memory is reused as soon as its tensors are freed; a replay uses the memory in the same order.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict

import torch

from dovetail_cpu.native_memory import NativeMemory

_ALIGNMENT_BYTES = 64


class ActivationArena:
    """An arena of `num_bytes`. The system allocates the pages on their first write."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = NativeMemory(num_bytes)


class ArenaLease:
    """The allocations of one recorded step. They begin at the start of the arena."""

    def __init__(self, arena: ActivationArena) -> None:
        self._memory = arena.memory
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Return uninitialized memory, uint8 [num_bytes], or None if the arena is full.

        num_bytes: positive. The memory is free again when the tensor and all its views are freed.
        """
        size = -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        free = self._free[size]
        if not free:
            if self._used + size > self._memory.num_bytes:
                return None
            free.append(self._memory.address + self._used)
            self._used += size
        address = free.pop()
        block = (ctypes.c_uint8 * num_bytes).from_address(address)
        # The tensor's storage keeps `block` alive. `block` does not own the memory.
        block.owner = self._memory
        weakref.finalize(block, free.append, address).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)

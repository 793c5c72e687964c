"""Memory for what a recorded run makes on its way: at the same addresses whenever it is replayed.

All recordings share one piece: only one is under way at a time. Within a recording memory is used
again as soon as its tensors are gone, as a replay will do in the same order. Depends on no
operation.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict

import torch

from dovetail_cpu.linear_kernel import NativeMemory

_ALIGNMENT_BYTES = 64


class ActivationArena:
    """One piece of memory of `num_bytes`; its pages are taken when they are first written to."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = NativeMemory(num_bytes)


class ArenaLease:
    """One recording's use of the arena, from its beginning."""

    def __init__(self, arena: ActivationArena) -> None:
        self._memory = arena.memory
        self._used = 0
        self._free: dict[int, list[int]] = defaultdict(list)

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """Return uninitialised memory, uint8 [num_bytes], above 0; None if no more is left.

        It is free again when the tensor and all its views are gone.
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
        # Held by the tensor's storage; what it does not own lives as long as itself.
        block.owner = self._memory
        weakref.finalize(block, free.append, address).atexit = False
        return torch.frombuffer(block, dtype=torch.uint8)

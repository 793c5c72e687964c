"""Allocates memory for packed weights in the background."""

from __future__ import annotations

import threading

from dovetail_cpu.native_memory import NativeMemory

_HUGE_PAGE_BYTES = 2 << 20


class EarlyMemory:
    """Memory whose pages a thread allocates, one after another, until `take` is called.

    The system clears each page, and the host of a virtual machine may have to provide it first,
    which takes up to a second per GiB. touched_bytes: number of bytes whose pages are allocated.
    """

    def __init__(self, num_bytes: int) -> None:
        """Start the thread. Raise CapacityError if the address space is not available."""
        self._memory = NativeMemory(num_bytes)
        self.touched_bytes = 0
        self._is_taken = False
        self._thread = threading.Thread(
            target=self._allocate, name="dovetail-early-memory", daemon=True
        )
        self._thread.start()

    def take(self) -> NativeMemory:
        """Stop the thread, and return the memory."""
        self._is_taken = True
        self._thread.join()
        return self._memory

    def _allocate(self) -> None:
        # `madvise` would block the memory allocations of other threads during a page.
        size = self._memory.num_bytes
        for start in range(0, size, _HUGE_PAGE_BYTES):
            if self._is_taken:
                return
            end = min(start + _HUGE_PAGE_BYTES, size)
            self._memory.touch(start, end - start)
            self.touched_bytes = end

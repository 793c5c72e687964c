"""Allocates memory for packed weights in the background."""

from __future__ import annotations

import threading

from dovetail_cpu.native_memory import NativeMemory

KEPT_S = 30.0
"""Memory that is allocated but not taken is released after this time: the start has failed."""
_HUGE_PAGE_BYTES = 2 << 20


class EarlyMemory:
    """Memory whose pages a thread allocates, one after another, until `take` is called.

    The system clears each page, and the host of a virtual machine may have to provide it first,
    which takes up to a second per GiB. touched_bytes: number of bytes whose pages are allocated.
    """

    def __init__(self, num_bytes: int) -> None:
        """Start the thread. Raise CapacityError if the address space is not available."""
        self._memory: NativeMemory | None = NativeMemory(num_bytes)
        self.touched_bytes = 0
        self._is_taken = threading.Event()
        self._thread = threading.Thread(
            target=self._allocate, args=(self._memory,), name="dovetail-early-memory", daemon=True
        )
        self._thread.start()

    def take(self) -> NativeMemory | None:
        """Stop the thread, and return the memory, or None if it was released after `KEPT_S`."""
        self._is_taken.set()
        self._thread.join()
        return self._memory

    def _allocate(self, memory: NativeMemory) -> None:
        # `madvise` would block the memory allocations of other threads during a page.
        for start in range(0, memory.num_bytes, _HUGE_PAGE_BYTES):
            if self._is_taken.is_set():
                return
            end = min(start + _HUGE_PAGE_BYTES, memory.num_bytes)
            memory.touch(start, end - start)
            self.touched_bytes = end
        if not self._is_taken.wait(KEPT_S):
            # An exception that the program keeps refers to the parts of the failed engine.
            self._memory = None

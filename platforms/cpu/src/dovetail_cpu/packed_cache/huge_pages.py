"""Moves mapped weights to huge pages while the engine runs.

A step reads all weights. From a mapped file, most of which is in pages of 4 KiB, this takes up to a
fifth longer than from huge pages. The start of the engine does not wait for the copy: a thread
copies the file piece by piece to huge pages, and then moves them to the addresses of the mapping.
Other threads may read the weights meanwhile: the content is the same before and after, and during
the move the system lets them wait.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import sys
import threading
from pathlib import Path

from dovetail.machine import read_memory, read_system_file
from dovetail_cpu.linear_kernel import address_of
from dovetail_cpu.memory_nodes import spread_pages

logger = logging.getLogger(__name__)

DELAY_S = 0.25
"""The first request after a start does not compete with the copy."""
MEMORY_SHARE = 0.5
"""Weights are moved if they need at most this share of the available memory."""
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
STATISTICS = Path("/proc/self/statm")
HUGE_PAGE_BYTES = 2 << 20
_PIECE_BYTES = 16 * HUGE_PAGE_BYTES
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_address, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class HugePageMover:
    """A thread that moves a mapping to huge pages. num_moved: number of bytes that are moved."""

    def __init__(self, mapped: memoryview) -> None:
        """Start the thread. mapped: a private mapping of a file that nothing writes to."""
        self.num_moved = 0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(mapped,), name="dovetail-huge-pages", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the current piece, and wait for it."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self, mapped: memoryview) -> None:
        if self._is_stopped.wait(DELAY_S):
            return
        address = address_of(mapped)
        first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (address + len(mapped)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        for start in range(first, end, _PIECE_BYTES):
            num_bytes = min(_PIECE_BYTES, end - start)
            if self._is_stopped.is_set() or not _move(start, num_bytes):
                break
            self.num_moved += num_bytes
        logger.info("%.2f GiB of packed weights are in huge pages.", self.num_moved / (1 << 30))


def can_move(num_bytes: int) -> bool:
    """Return whether the system has huge pages, and enough memory for copies of this size."""
    if not (sys.platform == "linux" and hasattr(_libc, "mremap")):
        return False
    setting = read_system_file(SETTING)
    memory = read_memory()
    left = memory.get("limit", 1 << 62) - _resident_bytes()
    available = min(memory.get("available", 0), left)
    has_huge_pages = "[always]" in setting or "[madvise]" in setting
    return has_huge_pages and HUGE_PAGE_BYTES <= num_bytes <= MEMORY_SHARE * available


def _resident_bytes() -> int:
    """Return how much memory this process uses."""
    fields = read_system_file(STATISTICS).split()
    return int(fields[1]) * mmap.PAGESIZE if len(fields) > 1 else 0


def _move(address: int, num_bytes: int) -> bool:
    """Replace pages by huge pages with the same content. Return False if that fails.

    address, num_bytes: multiples of HUGE_PAGE_BYTES.
    """
    mapped_bytes = num_bytes + HUGE_PAGE_BYTES
    base = _call(
        "mmap",
        (_address, _size, _int, _int, _int, ctypes.c_long),
        *(None, mapped_bytes, mmap.PROT_READ | mmap.PROT_WRITE),
        *(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0),
    )
    if base is None or base == _FAILED:
        return False
    copy = -(-base // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    for start, end in ((base, copy), (copy + num_bytes, base + mapped_bytes)):
        if end > start:
            _call("munmap", (_address, _size), start, end - start)
    _call("madvise", (_address, _size, _int), copy, num_bytes, mmap.MADV_HUGEPAGE)
    spread_pages(copy, num_bytes)
    ctypes.memmove(copy, address, num_bytes)
    _call("mprotect", (_address, _size, _int), copy, num_bytes, mmap.PROT_READ)
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    types = (_address, _size, _size, _int, _address)
    if _call("mremap", types, copy, num_bytes, num_bytes, flags, address) == address:
        return True
    _call("munmap", (_address, _size), copy, num_bytes)
    return False


def _call(name: str, types: tuple[type, ...], *arguments: int | None) -> int | None:
    """Call a function of the C library, which returns an address or a code.

    Other threads run Python code meanwhile.
    """
    function = ctypes.CFUNCTYPE(_address, *types)((name, _libc))
    result: int | None = function(*arguments)
    return result

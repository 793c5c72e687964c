"""Memory of the native library. This module does not import torch."""

from __future__ import annotations

import ctypes
import mmap

from dovetail.errors import CapacityError
from dovetail_cpu.memory_nodes import spread_pages
from dovetail_cpu_kernels import library

_GIB = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memset.restype = ctypes.c_void_p


class NativeMemory:
    """Zeroed memory of the native library, in huge pages if available. Freed with the object."""

    def __init__(self, num_bytes: int) -> None:
        self._library = library()
        self.num_bytes = num_bytes
        self.address = self._library.dk_alloc(num_bytes) or 0
        if not self.address:
            raise CapacityError(
                f"Cannot allocate {num_bytes / _GIB:.2f} GiB for packed weights. Free "
                "memory, or choose a smaller model or quantization."
            )
        spread_pages(self.address, num_bytes)

    def touch(self, start: int, num_bytes: int) -> None:
        """Allocate the pages of a part that is not in use, by writing zeros.

        Other threads run Python code meanwhile.
        """
        _libc.memset(self.address + start, 0, num_bytes)

    def forget(self, start: int) -> None:
        """Release the pages from the byte `start` on. They are allocated again when written."""
        first = -(-(self.address + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (self.address + self.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            _libc.madvise(first, end - first, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if self.__dict__.get("address"):
            self._library.dk_free(self.address, self.num_bytes)

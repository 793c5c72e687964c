"""Release memory: pages of mapped files that have been read, and free memory of the allocator."""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def forget_pages(mapped: torch.Tensor) -> None:
    """Release the pages that lie wholly within `mapped`. A later read maps them again.

    mapped: an unmodified private mapping of a file; the contents of other memory would be lost. If
    its rows are strided, the memory between them is released too.
    If the system rejects this, the pages stay in memory; this is not an error.
    """
    page = mmap.PAGESIZE
    pairs = zip(mapped.shape, mapped.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = -(-mapped.data_ptr() // page) * page
    end = (mapped.data_ptr() + (last + 1) * mapped.itemsize) // page * page
    if end > start:
        _libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def release_free_memory() -> None:
    """Return free memory of the C library to the system, where possible (glibc)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Giving memory back: pages of mapped files that were read, and what the allocator keeps free."""

from __future__ import annotations

import ctypes
import mmap

import torch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def forget_pages(mapped: torch.Tensor) -> None:
    """Let go of the pages that lie wholly within `mapped`; whoever reads them maps them again.

    mapped: of a private mapping of a file that nobody has written to; of other memory the contents
    would be lost. Where rows lie apart, what is between them is let go, too. A kernel that
    refuses is no error: the pages only stay.
    """
    page = mmap.PAGESIZE
    pairs = zip(mapped.shape, mapped.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    start = -(-mapped.data_ptr() // page) * page
    end = (mapped.data_ptr() + (last + 1) * mapped.itemsize) // page * page
    if end > start:
        _libc.madvise(start, end - start, mmap.MADV_DONTNEED)


def release_free_memory() -> None:
    """Let the C library give freed memory back to the system, where it can (glibc)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Zeroed memory whose pages are allocated on first use, for devices that use host memory."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

_SMALL_BYTES = 1 << 20
"""Minimum size of a lazily allocated tensor, in bytes; smaller tensors use the normal allocator."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed tensor. In host memory, unused pages are not allocated.

    Its address never changes. Memory of a separate device is allocated immediately.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SMALL_BYTES or not is_host_memory(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def is_host_memory(device: torch.device) -> bool:
    """Return whether tensors of `device` are in host memory."""
    return host_view(torch.empty(0, device=device)) is not None


def host_view(tensor: torch.Tensor) -> np.ndarray | None:
    """Return the tensor's memory as an array, or None if the host cannot access it."""
    try:
        return tensor.numpy()
    except TypeError:
        return None

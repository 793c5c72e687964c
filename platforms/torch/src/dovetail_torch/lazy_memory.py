"""Zeroed memory of which only the pages that are used are taken, where the host computes."""

from __future__ import annotations

import math
import mmap

import numpy as np
import torch

_SMALL_BYTES = 1 << 20
"""Below this, memory of the allocator's own is as good."""


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed tensor; in the host's memory, untouched pages take none.

    Its address never changes. Memory of a device of its own is taken at once.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _SMALL_BYTES or not is_host_memory(device):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def is_host_memory(device: torch.device) -> bool:
    """Return whether tensors of `device` lie in the host's memory."""
    return host_view(torch.empty(0, device=device)) is not None


def host_view(tensor: torch.Tensor) -> np.ndarray | None:
    """Return the tensor's memory as an array, or None where the host cannot reach it."""
    try:
        return tensor.numpy()
    except TypeError:
        return None

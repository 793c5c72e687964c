"""Columns on the device that the host fills in each step, and the tokens stored on the device.

If the device computes in host memory, both use numpy, because an operation of the tensor library
takes several times as long for a few numbers.
Dimensions: N numbers.
"""

from __future__ import annotations

from array import array

import numpy as np
import torch

from dovetail.int_columns import increment
from dovetail_torch.lazy_memory import host_view

Array = np.ndarray


class DeviceColumn:
    """A column of `size` numbers at a fixed address."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tensor = torch.zeros(size, dtype=dtype, device=device)
        self._on_host = host_view(self._tensor)

    def fill(self, numbers_N: Array) -> torch.Tensor:
        """Write `numbers_N` to the buffer's beginning and return that part.

        The next call overwrites that part. Numbers are converted to the column's dtype.
        """
        part_N = self._tensor[: len(numbers_N)]
        if self._on_host is None:
            return part_N.copy_(torch.from_numpy(numbers_N))
        self._on_host[: len(numbers_N)] = numbers_N
        return part_N

    def increment(self, count: int) -> None:
        """Add 1 to the first `count` numbers. For host memory only."""
        assert self._on_host is not None, "columns must be in host memory"
        increment(memoryview(self._on_host), count)

    def begins_with(self, numbers: array[int]) -> bool:
        """Return whether the column starts with these numbers. For host memory only."""
        assert self._on_host is not None, "columns must be in host memory"
        return self._on_host[: len(numbers)].tobytes() == numbers.tobytes()

    def take(self, numbers_N: torch.Tensor) -> torch.Tensor:
        """Fill the column with numbers that are on the device. See `fill`."""
        return self._tensor[: len(numbers_N)].copy_(numbers_N)


class DeviceTokens:
    """Token ids on the device, int32. tensor: all token ids, in one dimension."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._on_host = host_view(tensor)

    def read(self, index_N: Array, into: DeviceColumn) -> torch.Tensor:
        """Return the tokens at the indices `index_N`, int64 [N].

        The result uses the memory of `into`.
        """
        if self._on_host is not None:
            return into.fill(self._on_host[index_N])
        indices = torch.from_numpy(index_N).to(self.tensor.device)
        return into.take(self.tensor.index_select(0, indices))

    def write(self, index_N: Array, token_ids_N: torch.Tensor) -> None:
        """Write tokens that are on the device to these indices, each at most once."""
        if self._on_host is not None:
            self._on_host[index_N] = token_ids_N.numpy()
            return
        indices = torch.from_numpy(index_N).to(self.tensor.device)
        self.tensor.index_copy_(0, indices, token_ids_N.to(torch.int32))

"""The device runtime of the fake device, a subclass of `AcceleratorRuntime`."""

from __future__ import annotations

import torch

from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.fake_device.device import DEVICE
from dovetail_torch.fake_device.module import install
from dovetail_torch.fake_device.tensor import NAME
from dovetail_torch.fake_device.virtual_memory import FakeVirtualMemory


class FakeDeviceRuntime(AcceleratorRuntime):
    """Selects the fake device. `activate` registers it with torch."""

    def __init__(self) -> None:
        super().__init__(NAME)

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Select the fake device."""
        install()
        return super().activate(local_rank, num_threads=num_threads)

    def pinned_empty(self, num_bytes: int) -> torch.Tensor:
        """Return memory that the fake device treats as pinned."""
        return DEVICE.flights.pinned_zeros(num_bytes)

    def virtual_memory(self) -> FakeVirtualMemory:
        """Return the virtual memory of the fake device."""
        return FakeVirtualMemory()

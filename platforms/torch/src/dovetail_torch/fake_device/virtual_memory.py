"""Virtual memory of the fake device: regions whose pages exist only while they are mapped.

This module implements `dovetail_torch.accelerator.virtual_memory.VirtualMemory`. A use of an
unmapped region is a fault, and newly mapped memory contains NaN in every float dtype.
"""

from __future__ import annotations

import mmap

import torch

from dovetail.errors import CapacityError
from dovetail_torch.fake_device.device import DEVICE
from dovetail_torch.fake_device.memory import Piece
from dovetail_torch.fake_device.tensor import FakeDeviceTensor

_GARBAGE = 0xFF


class FakeRegion:
    """A region. `map` takes its bytes from the device's memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        # The piece has no bytes of its own: `mapped_bytes` counts them.
        self._piece = Piece(DEVICE.memory, 0, DEVICE.timeline.default)
        self._piece.is_mapped = False
        self._pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._host = torch.frombuffer(self._pages, dtype=torch.uint8)

    def map(self) -> None:
        """Allocate the memory. Raise CapacityError if the device has too little."""
        DEVICE.watch.reject_in_capture("a change of mapped memory")
        if self._piece.is_mapped:
            DEVICE.watch.fault("a region was mapped twice.")
        if DEVICE.memory.free_bytes < self.num_bytes:
            raise CapacityError(
                f"the fake device has {DEVICE.memory.free_bytes} free bytes, not {self.num_bytes}."
            )
        DEVICE.memory.mapped_bytes += self.num_bytes
        self._host.fill_(_GARBAGE)
        self._piece.is_mapped = True

    def unmap(self) -> None:
        """Return the memory to the device. Record a fault if the device may still use it."""
        DEVICE.watch.reject_in_capture("a change of mapped memory")
        if not self._piece.is_mapped:
            DEVICE.watch.fault("a region was unmapped twice.")
        for use, moment in self._piece.uses():
            if not DEVICE.timeline.is_known(moment):
                DEVICE.watch.fault(
                    f"a region was unmapped while stream {moment.stream} still {use} it; wait for "
                    "the device first."
                )
        self._piece.is_mapped = False
        self._pages.madvise(mmap.MADV_DONTNEED)
        DEVICE.memory.mapped_bytes -= self.num_bytes

    def tensor(self) -> torch.Tensor:
        """Return the bytes of the region."""
        return FakeDeviceTensor(self._host, self._piece)

    def __del__(self) -> None:
        if self._piece.is_mapped:
            self._piece.is_mapped = False
            DEVICE.memory.mapped_bytes -= self.num_bytes


class FakeVirtualMemory:
    """The virtual memory of the fake device."""

    page_bytes = 16384

    def reserve(self, num_bytes: int) -> FakeRegion:
        """Return a region without memory."""
        return FakeRegion(num_bytes)

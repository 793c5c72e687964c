"""Device memory that can be returned to the device while its addresses stay reserved.

A platform implements `VirtualMemory`. `SleepableMemory` divides its regions among tensors and maps
or unmaps all of them together. A graph stores addresses, so it stays valid after a sleep.

The tensors are views of the regions, and torch's allocator does not know them. The alternative is a
pluggable allocator behind torch's memory pools. It needs a compiled library (a Python function
would be called while the allocator's lock is held, and wait for the interpreter lock, while a
thread with the interpreter lock may wait for the allocator), and a pool also contains temporary
tensors and freed blocks, which a sleep would save. Weights and cache have a known size and live
until the engine shuts down, so they need no allocator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from dovetail.errors import CapacityError

logger = logging.getLogger(__name__)

ALIGNMENT = 512
"""Tensors in a region start at multiples of this number of bytes, as in torch's allocator."""

_GIB = 1 << 30
_SEGMENT_PAGES = 16
"""Pages of a region that several small tensors share."""


class Region(Protocol):
    """A range of addresses, mapped to device memory or not. It is freed with its last tensor.

    num_bytes: its size, a multiple of the page size.
    """

    num_bytes: int

    def map(self) -> None:
        """Allocate the memory, with undefined contents. Raise CapacityError if that fails."""

    def unmap(self) -> None:
        """Return the memory to the device, after all work on it is complete."""

    def tensor(self) -> torch.Tensor:
        """Return the bytes of the region, uint8, while it is mapped."""


class VirtualMemory(Protocol):
    """A device that can map memory to reserved addresses. page_bytes: the granularity."""

    page_bytes: int

    def reserve(self, num_bytes: int) -> Region:
        """Return a region without memory. `num_bytes` is a multiple of the page size."""


class SleepableMemory:
    """Device memory that can be unmapped. Its tensors must not be used while it is not mapped.

    is_mapped: whether the tensors have memory. purpose: what the memory is for, in error messages.
    """

    def __init__(
        self, memory: VirtualMemory, purpose: str, release_unused: Callable[[], None]
    ) -> None:
        """release_unused: returns free memory that torch caches to the device."""
        self.is_mapped = True
        self.purpose = purpose
        self._memory = memory
        self._release_unused = release_unused
        self._regions: list[tuple[Region, torch.Tensor]] = []
        self._shared: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all regions."""
        return sum(region.num_bytes for region, _ in self._regions)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory with undefined contents, uint8. Raise CapacityError if that fails."""
        page = self._memory.page_bytes
        padded = -(-max(1, num_bytes) // ALIGNMENT) * ALIGNMENT
        if padded > page * _SEGMENT_PAGES // 2:
            return self._new_region(-(-padded // page) * page)[:num_bytes]
        if self._shared is None or self._shared.numel() < padded:
            self._shared = self._new_region(page * _SEGMENT_PAGES)
        taken, self._shared = self._shared[:num_bytes], self._shared[padded:]
        return taken

    def _new_region(self, num_bytes: int) -> torch.Tensor:
        region = self._memory.reserve(num_bytes)
        self._map([region])
        memory = region.tensor()
        self._regions.append((region, memory))
        return memory

    def contents(self) -> list[torch.Tensor]:
        """Return the bytes of each region, uint8, in a fixed order."""
        return [memory for _, memory in self._regions]

    def map(self) -> None:
        """Allocate the memory of all regions, with undefined contents.

        Raises CapacityError, and allocates nothing, if the device has too little free memory.
        """
        if not self.is_mapped:
            self._map([region for region, _ in self._regions])
            self.is_mapped = True

    def unmap(self) -> None:
        """Return the memory of all regions to the device, after all work on it is complete."""
        if self.is_mapped:
            self.is_mapped = False
            for region, _ in self._regions:
                region.unmap()

    def _map(self, regions: Iterable[Region]) -> None:
        mapped: list[Region] = []
        try:
            for region in regions:
                self._map_one(region)
                mapped.append(region)
        except CapacityError as error:
            for region in mapped:
                region.unmap()
            needed = sum(region.num_bytes for region in regions)
            raise CapacityError(
                f"There is not enough memory for {self.purpose}, {needed / _GIB:.2f} GiB: {error} "
                "Stop other processes on the device, then try again."
            ) from error

    def _map_one(self, region: Region) -> None:
        try:
            region.map()
        except CapacityError:
            self._release_unused()
            region.map()

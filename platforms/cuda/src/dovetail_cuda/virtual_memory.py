"""Virtual memory of a CUDA device: the driver's functions cuMem…, called through ctypes.

This module implements `dovetail_torch.accelerator.virtual_memory.VirtualMemory`. The driver library
needs no compiler. Only workers load it, because a process that has initialized it can no longer be
forked. Functions, structures and constants are those of cuda.h of CUDA 12 and 13. This module
requires a current context, which torch creates when it selects a device.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import Any

import torch

from dovetail.errors import CapacityError, PluginError

LIBRARY = "libcuda.so.1"

_OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
_SUPPORTED = 102
"""CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED."""
_PINNED = 1
"""CU_MEM_ALLOCATION_TYPE_PINNED: device memory that stays where it is."""
_ON_DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE."""
_READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE."""
_RECOMMENDED = 1
"""CU_MEM_ALLOC_GRANULARITY_RECOMMENDED."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class AllocationFlags(ctypes.Structure):
    """The member allocFlags of CUmemAllocationProp."""

    _fields_ = (
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32_metadata", c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", c_int))


_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuMemGetAllocationGranularity": (c_void_p, c_void_p, c_int),
    "cuMemAddressReserve": (c_void_p, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemCreate": (c_void_p, c_size_t, c_void_p, c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, c_void_p, c_size_t),
}


class _Calls:
    """The driver's functions for one device. properties: the properties of its allocations."""

    def __init__(self, library: Any, device: int) -> None:
        self._library = library
        for name, types in _ARGUMENTS.items():
            getattr(library, name).argtypes = types
        self.properties = AllocationProperties(type=_PINNED)
        self.properties.location = Location(type=_ON_DEVICE, id=device)
        self.access = AccessDescription(location=self.properties.location, flags=_READ_WRITE)

    def status(self, function: str, *arguments: Any) -> int:
        """Call a function and return its status, 0 for success."""
        status: int = getattr(self._library, function)(*arguments)
        return status

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function. Raise CapacityError without memory, or PluginError."""
        status = self.status(function, *arguments)
        if status == _OUT_OF_MEMORY:
            raise CapacityError("The device has too little free memory.")
        if status:
            raise PluginError(
                f"The CUDA driver's function {function} failed with error {status}; sleep mode "
                "cannot continue. Check the device with `nvidia-smi`, and restart the engine."
            )


class CUDARegion:
    """A range of addresses of a device. It is freed when its last tensor is freed."""

    def __init__(self, calls: _Calls, num_bytes: int, wrap: Wrap) -> None:
        self.num_bytes = num_bytes
        self._calls = calls
        self._wrap = wrap
        address = c_ulonglong()
        calls.call("cuMemAddressReserve", ctypes.byref(address), num_bytes, 0, 0, 0)
        self.address = address.value
        self._mapped: list[int] = []
        free = weakref.finalize(self, _free, calls, self.address, num_bytes, self._mapped)
        free.atexit = False  # the memory is freed when the process exits

    def map(self) -> None:
        """Allocate the memory and map it. Raise CapacityError if the device has too little."""
        calls, handle, size = self._calls, c_ulonglong(), self.num_bytes
        provided = (size, ctypes.byref(calls.properties), 0)
        calls.call("cuMemCreate", ctypes.byref(handle), *provided)
        try:
            calls.call("cuMemMap", self.address, size, 0, handle, 0)
            self._mapped.append(self.address)
            calls.call("cuMemSetAccess", self.address, size, ctypes.byref(calls.access), 1)
        except BaseException:
            if self._mapped:
                self.unmap()
            raise
        finally:
            # The mapping keeps the memory; without a mapping the memory is freed.
            calls.call("cuMemRelease", handle)

    def unmap(self) -> None:
        """Return the memory to the device, after all work on it is complete."""
        self._calls.call("cuMemUnmap", self.address, self.num_bytes)
        self._mapped.clear()

    def tensor(self) -> torch.Tensor:
        """Return the bytes of the region, uint8."""
        return self._wrap(self)


Wrap = Callable[[CUDARegion], torch.Tensor]
"""A function that returns the bytes of a mapped region as a tensor, which keeps the region."""


class CUDAVirtualMemory:
    """The virtual memory of one CUDA device."""

    def __init__(self, device: int, *, library: Any = None, wrap: Wrap | None = None) -> None:
        """Check the device. Raises PluginError if it has no virtual memory.

        device: its index in this process. library: the driver; None loads the system's library.
        wrap: None returns tensors of the device.
        """
        self._calls = _Calls(library or _load(), device)
        self._wrap = wrap or _as_tensor
        calls = self._calls
        calls.call("cuInit", 0)
        handle, supported = c_int(), c_int()
        calls.call("cuDeviceGet", ctypes.byref(handle), device)
        calls.call("cuDeviceGetAttribute", ctypes.byref(supported), _SUPPORTED, handle)
        if not supported.value:
            raise PluginError(
                f"enable_sleep_mode=True: device {device} does not support virtual memory "
                "management, for example because it is a virtual GPU; set enable_sleep_mode=False."
            )
        size, properties = c_size_t(), ctypes.byref(calls.properties)
        calls.call("cuMemGetAllocationGranularity", ctypes.byref(size), properties, _RECOMMENDED)
        self.page_bytes = size.value

    def reserve(self, num_bytes: int) -> CUDARegion:
        """Return a region without memory. `num_bytes` is a multiple of the page size."""
        return CUDARegion(self._calls, num_bytes, self._wrap)


class _DeviceBytes:
    """Exposes a region to torch through the protocol `__cuda_array_interface__`.

    The tensor keeps it alive.
    """

    def __init__(self, region: CUDARegion) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.num_bytes,),
            "typestr": "|u1",
            "data": (region.address, False),
            "version": 3,
        }


def _as_tensor(region: CUDARegion) -> torch.Tensor:
    device = torch.device("cuda", torch.cuda.current_device())
    return torch.as_tensor(_DeviceBytes(region), device=device)


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise PluginError(
            f"enable_sleep_mode=True needs the NVIDIA driver, but {LIBRARY} cannot be loaded: "
            f"{error}."
        ) from error


def _free(calls: _Calls, address: int, num_bytes: int, mapped: list[int]) -> None:
    """Free a region. Errors are ignored, because a failed device frees its memory itself."""
    if mapped:
        calls.status("cuMemUnmap", address, num_bytes)
    calls.status("cuMemAddressFree", address, num_bytes)

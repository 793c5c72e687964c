"""Queries the NVIDIA driver through its management library, which creates no context on a device.

The CUDA library itself is not used: a process that has initialized it can no longer be forked.
Functions and constants are those of nvml.h. This module does not depend on torch.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dovetail.errors import PluginError

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED: for example the memory of a device that uses the host's memory."""
_NO_PERMISSION = 4
"""NVML_ERROR_NO_PERMISSION: the device is counted, but this process may not use it."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One device, or a partition (MIG) of a device.

    uuid: "GPU-…" or "MIG-…". capability: compute capability, major and minor. problem: why the
    driver cannot describe the device, or ""; its other fields are then empty.
    """

    uuid: str
    name: str
    total_bytes: int
    capability: tuple[int, int]
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver's report. cuda: the newest CUDA version that it supports.

    cards: the devices that this process may use, in the driver's order. partitions: the requested
    partitions of devices, as far as they exist.
    """

    version: str
    cuda: tuple[int, int]
    cards: tuple[Card, ...]
    partitions: tuple[Card, ...] = ()


class DriverCallError(PluginError):
    """A call of the management library failed. status: the error code that it returned."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(
            f"the NVIDIA driver's function {function} failed with error {status}: check that "
            "`nvidia-smi` works; after a driver update, restart the machine"
        )
        self.status = status


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def read_driver(library: Any = None, partitions: Sequence[str] = ()) -> Driver:
    """Return the driver's report. Raise PluginError with advice if that fails.

    A device that the driver cannot describe is a card with a problem.
    library: the management library; None loads the system's library. partitions: the names of
    partitions to describe, such as "MIG-…".
    """
    library = library or _load()
    with _session(library):
        cuda = _number(library, "nvmlSystemGetCudaDriverVersion_v2")
        count = _number(library, "nvmlDeviceGetCount_v2")
        return Driver(
            version=_text(library, "nvmlSystemGetDriverVersion"),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            cards=tuple(filter(None, (_card(library, index) for index in range(count)))),
            partitions=tuple(filter(None, (_partition(library, name) for name in partitions))),
        )


def read_free_bytes(uuid: str, library: Any = None) -> int | None:
    """Return the free memory of a device or partition, without creating a context on it.

    None if the driver does not report it. library: as in `read_driver`.
    """
    try:
        library = library or _load()
        with _session(library):
            return _memory(library, _handle_of(library, uuid)).free
    except PluginError:
        return None


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise PluginError(
            f"no NVIDIA driver was found ({LIBRARY} cannot be loaded): install one; in a "
            "container, start it with access to the driver (such as `--gpus all`)"
        ) from error


@contextmanager
def _session(library: Any) -> Iterator[None]:
    _call(library, "nvmlInit_v2")
    try:
        yield
    finally:
        library.nvmlShutdown()


def _card(library: Any, index: int) -> Card | None:
    """Return the device, or None if this process may not use it. CUDA also skips such a device."""
    handle = ctypes.c_void_p()
    try:
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return _described(library, handle, handle)
    except DriverCallError as error:
        if error.status == _NO_PERMISSION:
            return None
        name = f"device {index} of the driver"
        return Card(uuid="", name=name, total_bytes=0, capability=(0, 0), problem=str(error))


def _partition(library: Any, name: str) -> Card | None:
    """Return a partition, or None if the driver does not know its name."""
    device = ctypes.c_void_p()
    try:
        handle = _handle_of(library, name)
        place = handle, ctypes.byref(device)
        _call(library, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", *place)
        return _described(library, handle, device)
    except DriverCallError:
        return None


def _handle_of(library: Any, uuid: str) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    name = ctypes.c_char_p(uuid.encode())
    _call(library, "nvmlDeviceGetHandleByUUID", name, ctypes.byref(handle))
    return handle


def _described(library: Any, handle: ctypes.c_void_p, device: ctypes.c_void_p) -> Card:
    """Return the card that a driver handle refers to.

    device: the handle to the whole device.
    """
    major, minor = ctypes.c_int(), ctypes.c_int()
    place = ctypes.byref(major), ctypes.byref(minor)
    _call(library, "nvmlDeviceGetCudaComputeCapability", device, *place)
    try:
        total_bytes = _memory(library, handle).total
    except DriverCallError as error:
        if error.status != _NOT_SUPPORTED:
            raise
        total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Card(
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        name=_text(library, "nvmlDeviceGetName", handle),
        total_bytes=total_bytes,
        capability=(major.value, minor.value),
    )


def _memory(library: Any, handle: ctypes.c_void_p) -> _Memory:
    memory = _Memory()
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return memory


def _number(library: Any, function: str) -> int:
    number = ctypes.c_int()
    _call(library, function, ctypes.byref(number))
    return number.value


def _text(library: Any, function: str, *subject: Any) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, function, *subject, text, ctypes.c_uint(_TEXT_BYTES))
    return text.value.decode(errors="replace")


def _call(library: Any, function: str, *arguments: Any) -> None:
    """Call a function. Raise DriverCallError if it fails."""
    status: int = getattr(library, function)(*arguments)
    if status:
        raise DriverCallError(function, status)

"""Query the NVIDIA driver through its management library, which creates no context on a device.

The CUDA library itself is not used: a process that has initialized it can no longer be forked.
Functions and constants are those of nvml.h. Does not depend on torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dovetail.errors import PluginError

LIBRARY = "libnvidia-ml.so.1"
_TEXT_BYTES = 96
_NO_PERMISSION = 4
"""NVML_ERROR_NO_PERMISSION: the device is counted, but this process may not use it."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One device. uuid: "GPU-…". capability: compute capability, major and minor."""

    uuid: str
    name: str
    total_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver's report. cuda: the newest CUDA version that it supports.

    cards: the devices that this process may use, in the driver's order.
    """

    version: str
    cuda: tuple[int, int]
    cards: tuple[Card, ...]


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def read_driver(library: Any = None) -> Driver:
    """Return the driver's report; raise PluginError with advice if that fails.

    library: the management library; None loads the system's library.
    """
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise PluginError(
                f"no NVIDIA driver was found ({LIBRARY} cannot be loaded): install one; in a "
                "container, start it with access to the driver (such as `--gpus all`)"
            ) from error
    with _session(library):
        cuda = _number(library, "nvmlSystemGetCudaDriverVersion_v2")
        count = _number(library, "nvmlDeviceGetCount_v2")
        return Driver(
            version=_text(library, "nvmlSystemGetDriverVersion"),
            cuda=(cuda // 1000, cuda % 1000 // 10),
            cards=tuple(filter(None, (_card(library, index) for index in range(count)))),
        )


@contextmanager
def _session(library: Any) -> Iterator[None]:
    _call(library, "nvmlInit_v2")
    try:
        yield
    finally:
        library.nvmlShutdown()


def _card(library: Any, index: int) -> Card | None:
    """Return the device, or None if this process may not use it; CUDA also skips such a device."""
    handle, memory = ctypes.c_void_p(), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    asked = "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle)
    if _call(library, *asked, allowed=_NO_PERMISSION):
        return None
    _call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    place = ctypes.byref(major), ctypes.byref(minor)
    _call(library, "nvmlDeviceGetCudaComputeCapability", handle, *place)
    return Card(
        uuid=_text(library, "nvmlDeviceGetUUID", handle),
        name=_text(library, "nvmlDeviceGetName", handle),
        total_bytes=memory.total,
        capability=(major.value, minor.value),
    )


def _number(library: Any, function: str) -> int:
    number = ctypes.c_int()
    _call(library, function, ctypes.byref(number))
    return number.value


def _text(library: Any, function: str, *subject: Any) -> str:
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    _call(library, function, *subject, text, ctypes.c_uint(_TEXT_BYTES))
    return text.value.decode(errors="replace")


def _call(library: Any, function: str, *arguments: Any, allowed: int = 0) -> int:
    """Call a function; return its status, 0 or `allowed`; raise PluginError for other values."""
    status: int = getattr(library, function)(*arguments)
    if status not in (0, allowed):
        raise PluginError(
            f"the NVIDIA driver's function {function} failed with error {status}: check that "
            "`nvidia-smi` works; after a driver update, restart the machine"
        )
    return status

"""The torch device module of the fake device.

`install` registers the device with torch, once per process: its name, this module, and the
functions that create tensors. Importing this module does not register it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from dovetail_torch.fake_device.device import DEVICE
from dovetail_torch.fake_device.graphs import FakeGraph
from dovetail_torch.fake_device.tensor import HOST, NAME, FakeDeviceTensor, copy, wrap
from dovetail_torch.fake_device.timeline import Event, Stream

_PRIVATE = "PrivateUse1"
"""The dispatch key of torch for out-of-tree devices."""

aten = torch.ops.aten
_FACTORIES = (
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.eye.m,
    aten.randperm.default,
)
"""The operations that create all new tensors in torch, and the operations that resize tensors."""
_SIZED = (aten.empty.memory_format, aten.empty_strided.default)


class FakeDeviceModule:
    """The result of `torch.get_device_module` for the fake device, which has index 0."""

    def is_available(self) -> bool:
        """Return whether a device exists."""
        return DEVICE.num_devices > 0

    def is_initialized(self) -> bool:
        """Return True: no initialization is needed."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing, because random numbers come from the host."""

    def device_count(self) -> int:
        """Return the number of devices."""
        return DEVICE.num_devices

    def current_device(self) -> int:
        """Return 0."""
        return 0

    def set_device(self, device: Any) -> None:
        """Select a device. Raise RuntimeError if it does not exist."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if not 0 <= index < DEVICE.num_devices:
            raise RuntimeError(
                f"device {index} does not exist; the number of devices is {DEVICE.num_devices}"
            )

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        """Return the name and the memory size of the device."""
        total = DEVICE.memory.total_bytes
        return SimpleNamespace(name="fake device", total_memory=total, major=0, minor=0)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        """Return a placeholder capability."""
        return 0, 0

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Return free and total bytes."""
        return DEVICE.memory.free_bytes, DEVICE.memory.total_bytes

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes of all tensors."""
        return DEVICE.memory.allocated_bytes

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes taken from the device, including freed tensors."""
        return DEVICE.memory.reserved_bytes

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the peak bytes of tensors since the last reset."""
        return DEVICE.memory.peak_bytes

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Start measuring the peak memory."""
        DEVICE.memory.peak_bytes = DEVICE.memory.allocated_bytes

    def empty_cache(self) -> None:
        """Return unused memory to the device."""
        DEVICE.memory.reserved_bytes = DEVICE.memory.allocated_bytes

    def synchronize(self, device: Any = None) -> None:
        """Wait for all work.

        This counts as a hidden wait if the current block does not allow synchronization.
        """
        DEVICE.watch.synchronizes("synchronize()")
        DEVICE.timeline.learn_all()
        DEVICE.watch.check()

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:  # noqa: N802 - torch's name
        """Return a new stream."""
        return Stream(DEVICE.timeline)

    def Event(self, **_: Any) -> Event:  # noqa: N802 - torch's name
        """Return a new event."""
        return Event(DEVICE.timeline)

    def stream(self, stream: Stream) -> AbstractContextManager[None]:
        """Make `stream` this thread's current stream while a block runs."""
        return DEVICE.timeline.using(stream)

    def current_stream(self, device: Any = None) -> Stream:
        """Return this thread's current stream."""
        return DEVICE.timeline.current

    def CUDAGraph(self) -> FakeGraph:  # noqa: N802 - torch's name
        """Return a new graph."""
        return FakeGraph()

    def graph_pool_handle(self) -> object:
        """Return a handle to memory that graphs share."""
        return object()

    def default_stream(self, device: Any = None) -> Stream:
        """Return the stream that is the default in every thread."""
        return DEVICE.timeline.default


def install() -> FakeDeviceModule:
    """Register the device with torch if needed, and return its module.

    Raises RuntimeError if another out-of-tree device is registered; torch supports only one.
    """
    global _installed
    if _installed is None:
        module = FakeDeviceModule()
        torch._register_device_module(NAME, module)
        guard = type("FakeGuard", (torch._C._acc.DeviceGuard,), {"type_": _device_type})
        torch._C._acc.register_python_privateuseone_device_guard(guard())
        library = torch.library.Library("aten", "IMPL")
        for func in _FACTORIES:
            library.impl(func, _factory(func), _PRIVATE)
        library.impl(aten._copy_from.default, _copy_from, _PRIVATE)
        _installed = (module, library)
    return _installed[0]


_installed: tuple[FakeDeviceModule, torch.library.Library] | None = None


def _device_type(_: object) -> Any:
    return torch._C._autograd.DeviceType.PrivateUse1


def _copy_from(
    source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    """Copy a tensor while torch has disabled Python dispatch, such as during tensor creation."""
    return copy(target, source, non_blocking)


def _factory(func: Any) -> Any:
    """Return the device's version of `func`: it computes on the host and wraps the result."""

    def make(*args: Any, **kwargs: Any) -> FakeDeviceTensor:
        kwargs = kwargs | {"device": HOST}
        kwargs.pop("pin_memory", None)
        if func in _SIZED:
            dtype = kwargs.get("dtype") or torch.get_default_dtype()
            DEVICE.memory.require(math.prod(args[0]) * dtype.itemsize)
        graph = DEVICE.watch.capturing
        if graph is None or func in _SIZED:
            return wrap(func(*args, **kwargs))
        return wrap(graph.record(func, args, kwargs, (), ((), ()), lambda *_: None))

    return make

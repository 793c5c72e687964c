"""The XPU platform: Intel devices through `torch.xpu`. It has not been run on a device.

The probe looks for a torch built for XPU, the Level Zero loader and a render node. It does not
import torch or create a context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail_torch.accelerator.torch_build import read_torch_build

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
    from dovetail_torch.accelerator.runtime import AcceleratorRuntime

_LOADER = "libze_loader.so.1"
_NODES = Path("/dev/dri")
_PREFERENCES = {
    "worker": ("xpu",),
    "executor": ("uniproc",),
    "attention": ("triton", "torch"),
    "linear_method": ("torch",),
    "ops": ("triton", "torch"),
}
_DEFAULTS = {
    "cache.gpu_memory_utilization": (0.9, "only this engine uses the device's memory"),
    "scheduler.async_scheduling": (True, "the host can schedule while the device computes"),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Properties of a machine.

    toolkit: torch's XPU toolkit or "". num_nodes: number of render nodes.
    """

    torch_version: str
    toolkit: str
    has_loader: bool
    num_nodes: int


def look() -> Machine:
    """Return this machine's properties."""
    build = read_torch_build("xpu")
    try:
        has_loader = bool(ctypes.CDLL(_LOADER))
    except OSError:
        has_loader = False
    num_nodes = len(list(_NODES.glob("renderD*")))
    return Machine(
        torch_version=build.version,
        toolkit=build.toolkit,
        has_loader=has_loader,
        num_nodes=num_nodes,
    )


def reasons_against(machine: Machine) -> tuple[str, ...]:
    """Return the reasons why XPUs cannot be used, each with advice, or () if they can be used."""
    reasons = []
    if not machine.toolkit:
        reasons.append(
            f"torch {machine.torch_version or '(none)'} is built without XPU: install a "
            "torch build for XPU (https://pytorch.org/get-started)"
        )
    if not machine.has_loader:
        reasons.append(f"no XPU driver was found ({_LOADER} cannot be loaded): install Level Zero")
    if not machine.num_nodes:
        reasons.append(
            f"no XPU was found (there is no render node in {_NODES}): check `ls {_NODES}`"
        )
    return tuple(reasons)


class XPUPlatform(Platform):
    """A machine with Intel devices, their driver and a torch built for them."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="xpu", device_type="xpu")
    rank: ClassVar[int] = 90
    look: ClassVar[Callable[[], Machine]] = staticmethod(look)
    """A function that returns the properties of this machine."""

    @classmethod
    def probe(cls) -> Probe:
        """Return whether a device is usable, without creating a context."""
        reasons = reasons_against(cls.look())
        return Probe(usable=not reasons, reasons=reasons)

    def capabilities(self) -> frozenset[str]:
        """Return the dtypes of torch on these devices, and support for pinned memory."""
        return frozenset({"dtype.float32", "dtype.bfloat16", "dtype.float16", "pin_memory"})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the device's memory, which only torch can report."""
        import torch  # imported here because it is slow

        return int(torch.xpu.get_device_properties(local_rank).total_memory)

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the plugin names that this platform prefers, best first."""
        return _PREFERENCES.get(kind, ())

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        """Propose most of the device's memory, and asynchronous scheduling."""
        return ConfigPatch(changes=_DEFAULTS)

    def runtime(self) -> AcceleratorRuntime:
        """Return the device runtime of this process."""
        from dovetail_torch.accelerator.runtime import AcceleratorRuntime  # imports torch

        return AcceleratorRuntime(self.info.device_type)

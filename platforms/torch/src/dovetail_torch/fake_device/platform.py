"""Platform and worker of the fake device, for tests: `platform="…:FakeDevicePlatform"`.

The platform is never selected automatically.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces import Platform, PlatformInfo, Probe

if TYPE_CHECKING:
    from dovetail_torch.fake_device.runtime import FakeDeviceRuntime

_WORKER = "dovetail_torch.fake_device.worker:FakeDeviceWorker"
_PREFERENCES = {
    "worker": (_WORKER,),
    "executor": ("uniproc",),
    "attention": ("torch",),
    "linear_method": ("torch",),
    "ops": ("torch",),
}


class FakeDevicePlatform(Platform):
    """The platform of a machine with one fake device."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="fake_device", device_type="privateuseone")
    automatic: ClassVar[bool] = False

    @classmethod
    def probe(cls) -> Probe:
        """Report the fake device as usable on every machine, because it runs on the host."""
        return Probe(usable=True)

    def capabilities(self) -> frozenset[str]:
        """Return the dtypes in which the host computes."""
        return frozenset({"dtype.float32", "dtype.bfloat16", "dtype.float16", "pin_memory"})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the memory that a test has configured."""
        # Imports torch, which only workers need.
        from dovetail_torch.fake_device.device import DEVICE

        return DEVICE.memory.total_bytes

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the plugins that work on any device."""
        return _PREFERENCES.get(kind, ())

    def runtime(self) -> FakeDeviceRuntime:
        """Return the device runtime of this process."""
        from dovetail_torch.fake_device.runtime import FakeDeviceRuntime

        return FakeDeviceRuntime()

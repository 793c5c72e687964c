"""The CPU platform: always there, and modest with memory that others need, too."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces import ConfigPatch, Platform, PlatformInfo, Probe

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
    from dovetail_cpu.runtime import CPURuntime

_PREFERENCES = {
    "worker": ("cpu",),
    "executor": ("uniproc",),
    "attention": ("cpu", "torch"),
    "linear_method": ("native", "onednn", "torch"),
    "ops": ("native", "torch"),
}
_MEMORY_SHARE = 0.4


class CPUPlatform(Platform):
    """Any machine that torch runs on."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="cpu", device_type="cpu")

    @classmethod
    def probe(cls) -> Probe:
        """Return that it can be used: there is no machine without one."""
        return Probe(usable=True)

    def capabilities(self) -> frozenset[str]:
        """Return the dtypes that torch computes in on a CPU, and that ranks exchange tensors."""
        return frozenset({"dtype.float32", "dtype.bfloat16", "dtype.float16", "collectives"})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the machine's memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the plugin names that suit here, best first."""
        return _PREFERENCES.get(kind, ())

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        """Wish for a share of the memory that leaves the machine to its other users."""
        reason = "main memory is shared with everything else that runs on the machine"
        return ConfigPatch(changes={"cache.gpu_memory_utilization": (_MEMORY_SHARE, reason)})

    def runtime(self) -> CPURuntime:
        """Return the device operations of this process."""
        from dovetail_cpu.runtime import CPURuntime  # imports torch: only for a worker

        return CPURuntime()

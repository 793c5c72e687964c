"""The CPU platform. By default it does not use all memory, because other programs need some.

This module imports `dovetail.processes.affinity` before torch is imported; that module explains
why.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail.machine import read_cgroup_limits
from dovetail.processes.affinity import has_affinity

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
    from dovetail_cpu.preparation.preparation import Preparation
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
    """The CPU platform, for any machine on which torch runs."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="cpu", device_type="cpu")

    def __init__(self) -> None:
        """Create the platform."""
        self._preparation: Preparation | None = None
        self._is_taken = False
        self._lock = threading.Lock()

    @classmethod
    def probe(cls) -> Probe:
        """Report the CPU as usable, except on systems without Unix resource limits (Windows)."""
        if importlib.util.find_spec("resource") is None:
            reason = "Python has no module `resource` on this system: use Linux, macOS or WSL"
            return Probe(usable=False, reasons=(reason,))
        if not has_affinity():
            reason = "this system reports no affinity mask, so the default is one thread per CPU"
            return Probe(usable=True, reasons=(reason,))
        return Probe(usable=True)

    def capabilities(self) -> frozenset[str]:
        """Return the dtypes that torch supports on a CPU, and support for collective operations."""
        return frozenset({"dtype.float32", "dtype.bfloat16", "dtype.float16", "collectives"})

    def total_memory_bytes(self, local_rank: int = 0) -> int:
        """Return the memory of the machine, or of this process's cgroup if that is less."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(total, read_cgroup_limits().memory_bytes or total)

    def prefer(self, kind: str) -> Sequence[str]:
        """Return the plugin names that this platform prefers, best first."""
        return _PREFERENCES.get(kind, ())

    def defaults(self, config: RequestedConfig) -> ConfigPatch:
        """Propose a fraction of the memory, because other programs also need memory."""
        reason = "other programs on the machine also need main memory"
        return ConfigPatch(changes={"cache.gpu_memory_utilization": (_MEMORY_SHARE, reason)})

    def prepare(self, config: RequestedConfig) -> None:
        """Start to load torch's libraries and the packed weights.

        Only if this process runs the `cpu` worker. A result that is ready after `take_preparation`
        is cancelled.
        """
        parallel = config.parallel
        is_own = parallel.tensor_parallel_size == 1 and parallel.worker_cls in ("auto", "cpu")
        if is_own and parallel.executor_backend in ("auto", "uniproc"):
            # Imported here, because `explain` and `list` do not need it.
            from dovetail_cpu.preparation.preparation import Preparation

            preparation = Preparation(config)
            with self._lock:
                if not self._is_taken:
                    self._preparation = preparation
                    return
            preparation.cancel()

    def take_preparation(self) -> Preparation | None:
        """Return the result of `prepare`, once; None if nothing is prepared, or not yet."""
        with self._lock:
            self._is_taken = True
            preparation, self._preparation = self._preparation, None
        return preparation

    def runtime(self) -> CPURuntime:
        """Return the device runtime of this process."""
        from dovetail_cpu.runtime import CPURuntime  # imports torch, which only workers need

        return CPURuntime()

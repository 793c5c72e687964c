"""The CPU platform. By default it does not use all memory, because other programs need some.

This module imports `cores` before torch is imported; `cores` explains why.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces import ConfigPatch, Platform, PlatformInfo, Probe
from dovetail.machine import read_cgroup_limits
from dovetail_cpu.cores import allowed_cpus, has_affinity
from dovetail_cpu.options import CPUWorkerOptions

if TYPE_CHECKING:
    from dovetail.config import RequestedConfig
    from dovetail_cpu.packed_cache.prefetch import PackedPrefetch
    from dovetail_cpu.runtime import CPURuntime

_PREFERENCES = {
    "worker": ("cpu",),
    "executor": ("uniproc",),
    "attention": ("cpu", "torch"),
    "linear_method": ("native", "onednn", "torch"),
    "ops": ("native", "torch"),
}
_MEMORY_SHARE = 0.4
_MAX_PREFETCH_THREADS = 4
_OPTION_KEYS = ("cpu", "worker:cpu", "dovetail_cpu.worker:CPUWorker")
"""The keys of the worker's options in `plugin_options`."""


class CPUPlatform(Platform):
    """The CPU platform, for any machine on which torch runs."""

    info: ClassVar[PlatformInfo] = PlatformInfo(name="cpu", device_type="cpu")

    def __init__(self) -> None:
        """Create the platform."""
        self._prefetch: PackedPrefetch | None = None

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
        """Load torch's libraries and the packed weights in the background.

        Only if this process runs the `cpu` worker.
        """
        parallel = config.parallel
        is_own = parallel.tensor_parallel_size == 1 and parallel.worker_cls in ("auto", "cpu")
        if not is_own or parallel.executor_backend not in ("auto", "uniproc"):
            return
        from dovetail_cpu.torch_libraries import preload_torch

        self._prefetch = _prefetch_packed(config)
        if not config.model.skip_tokenizer_init:
            # The import of an extension module waits while libraries are loaded.
            importlib.import_module("tokenizers")
        preload_torch()

    def take_prefetch(self) -> PackedPrefetch | None:
        """Return the packed weights that `prepare` reads, once; None if it reads none."""
        prefetch, self._prefetch = self._prefetch, None
        return prefetch

    def runtime(self) -> CPURuntime:
        """Return the device runtime of this process."""
        from dovetail_cpu.runtime import CPURuntime  # imports torch, which only workers need

        return CPURuntime()


def _prefetch_packed(config: RequestedConfig) -> PackedPrefetch | None:
    """Start to read the packed weights of a safetensors checkpoint."""
    if config.load.load_format not in ("auto", "safetensors"):
        return None
    keys = [key for key in _OPTION_KEYS if key in config.plugin_options]
    try:
        options = CPUWorkerOptions(**(config.plugin_options[keys[0]] if keys else {}))
    except (TypeError, ValueError):
        return None  # reported when the worker is loaded
    # Imported before torch's libraries are loaded, because it imports an extension module.
    from dovetail_cpu.packed_cache.folder import chosen_folder
    from dovetail_cpu.packed_cache.prefetch import PackedPrefetch

    folder = chosen_folder(options)
    if folder is None or not folder.path.is_dir():
        return None
    # Another core imports torch meanwhile.
    num_threads = max(1, min(_MAX_PREFETCH_THREADS, len(allowed_cpus()) - 1))
    return PackedPrefetch(folder, config.model.model_dir, num_threads=num_threads)

"""The worker of devices that compute behind the host's back: the torch worker that does not wait.

Depends on no device's name; a platform's worker is a subclass, usually without a body.
"""

from __future__ import annotations

from contextlib import suppress
from typing import ClassVar, cast

from dovetail.errors import CapacityError
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.worker import TorchWorker

_GIB = 1 << 30


class AcceleratorWorker(TorchWorker):
    """One device behind an `AcceleratorRuntime`, which its platform gives."""

    provides: ClassVar[frozenset[str]] = TorchWorker.provides | {"async_output"}

    def init_device(self) -> None:
        """Take the device; raise CapacityError where others have left too little of it."""
        super().init_device()
        cache = self._context.config.cache
        if cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
            return
        runtime = cast("AcceleratorRuntime", self._runtime)
        total, free = runtime.total_memory_bytes(), runtime.free_bytes_at_start
        share = cache.gpu_memory_utilization
        if total * share > free:
            raise CapacityError(
                f"gpu_memory_utilization={share} asks for {total * share / _GIB:.2f} GiB of "
                f"{self._device}, but {free / _GIB:.2f} of {total / _GIB:.2f} GiB are free; give "
                f"at most {int(free / total * 100) / 100:.2f}, or end what else runs there."
            )

    def shutdown(self) -> None:
        """Let go of weights and cache, and leave their memory to others."""
        super().shutdown()
        if "_device" in self.__dict__:
            # A device that has failed gives nothing back, and its failure has been told.
            with suppress(RuntimeError):
                cast("AcceleratorRuntime", self._runtime).release()

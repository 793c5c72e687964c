"""The worker of asynchronous devices: the torch worker that does not wait for each step.

Contains no device names; a platform's worker is a subclass, usually without a body.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import ClassVar, cast

import torch

from dovetail.errors import CapacityError
from dovetail_torch.accelerator.graphs import AcceleratorGraphs
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.graphs.capture import GraphCapture
from dovetail_torch.worker import TorchWorker

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class AcceleratorWorker(TorchWorker):
    """Runs the model on one device, with the `AcceleratorRuntime` of its platform."""

    provides: ClassVar[frozenset[str]] = TorchWorker.provides | {"async_output"}

    def init_device(self) -> None:
        """Select the device; raise CapacityError if too little of its memory is free."""
        super().init_device()
        cache = self._context.config.cache
        if cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
            return
        runtime = cast("AcceleratorRuntime", self._runtime)
        total, free = runtime.total_memory_bytes(), runtime.free_bytes_at_start
        share = cache.gpu_memory_utilization
        if total * share > free:
            raise CapacityError(
                f"gpu_memory_utilization={share} requests {total * share / _GIB:.2f} GiB of "
                f"{self._device}, but {free / _GIB:.2f} of {total / _GIB:.2f} GiB are "
                "free; set gpu_memory_utilization to at most "
                f"{int(free / total * 100) / 100:.2f}, or stop other processes on the device."
            )

    def graph_capture(self) -> GraphCapture | None:
        """Return what captures graphs, if the device's torch module supports them.

        None with several ranks: exchanging tensors in graphs is not tested.
        """
        module = torch.get_device_module(self._device.type)
        if not hasattr(module, "CUDAGraph"):
            return None
        if self._context.world_size > 1:
            logger.warning("Steps run without graphs, because several ranks share the model.")
            return None
        return AcceleratorGraphs(module)

    def shutdown(self) -> None:
        """Free weights and cache, and return their memory to the device."""
        super().shutdown()
        if "_device" in self.__dict__:
            # A failed device cannot free memory; its failure has already been reported.
            with suppress(RuntimeError):
                cast("AcceleratorRuntime", self._runtime).release()

"""The worker of asynchronous devices: the torch worker that does not wait for each step.

This module contains no device names; a platform's worker is a subclass, usually without a body.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import ClassVar, cast

import torch
from torch import nn

from dovetail.errors import CapacityError, ConfigError
from dovetail.interfaces import GrammarOutput, OneRank, RankGroup, WeightLoader
from dovetail_torch.accelerator.graphs import AcceleratorGraphs
from dovetail_torch.accelerator.offload import (
    OffloadedLayers,
    OffloadPlan,
    pack_offloaded,
    plan_offload,
)
from dovetail_torch.accelerator.reloading import reload_weights
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.accelerator.sleep_mode import SleepMode
from dovetail_torch.distributed.checked_output import check_peers
from dovetail_torch.distributed.process_ranks import ProcessRanks
from dovetail_torch.distributed.small_all_reduce import use_small_all_reduce
from dovetail_torch.graphs.capture import GraphCapture
from dovetail_torch.runner.step_outputs import Output
from dovetail_torch.weights.finiteness import check_finite
from dovetail_torch.worker import TorchWorker

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class AcceleratorWorker(TorchWorker):
    """Runs the model on one device, with the `AcceleratorRuntime` of its platform.

    It implements the capability "sleep"; a worker whose runtime has virtual memory declares it.
    """

    provides: ClassVar[frozenset[str]] = TorchWorker.provides | {"async_output", "weight_offload"}
    _sleep_mode: SleepMode | None = None
    _offload: OffloadPlan | None = None

    def init_device(self) -> None:
        """Select the device. Raise CapacityError if too little of its memory is free.

        Raises ConfigError if sleep mode is enabled and the device does not support it.
        """
        super().init_device()
        if self._context.config.compute.custom_all_reduce and self._context.world_size > 1:
            self._ranks = self._with_small_all_reduce()
        cache = self._context.config.cache
        self._sleep_mode = self._make_sleep_mode() if cache.enable_sleep_mode else None
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

    def _with_small_all_reduce(self) -> RankGroup:
        """Return the ranks' group, with a fast all-reduce for small tensors if all support it."""
        runtime = cast("AcceleratorRuntime", self._runtime)
        fast, reason = None, ""
        try:
            fast = runtime.small_all_reduce(self._device)
        except (RuntimeError, AttributeError, ImportError, TypeError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
        return use_small_all_reduce(self._ranks, fast, reason, self._device)

    def _make_sleep_mode(self) -> SleepMode:
        runtime = cast("AcceleratorRuntime", self._runtime)
        memory = runtime.virtual_memory()
        if memory is None:
            raise ConfigError(
                f"enable_sleep_mode=True is not supported on {self._device}: its memory cannot be "
                "released without changing addresses; set enable_sleep_mode=False."
            )
        return SleepMode(runtime, memory)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Output:
        """Sample from the logits of the last executed plan.

        With several ranks, the result raises PeerLostError if one of them has exited.
        """
        output = super().sample_tokens(grammar)
        monitor = self._ranks.monitor if isinstance(self._ranks, ProcessRanks) else None
        return output if monitor is None else check_peers(output, monitor)

    def load_weights(self, model: nn.Module, loader: WeightLoader) -> int:
        """Load and pack the weights of `model`, and return the bytes read.

        With sleep mode the weights are in memory that `sleep` releases.
        """
        if self._offload is not None:
            return self._load_offloaded(model, loader, self._offload)
        num_bytes = super().load_weights(model, loader)
        if self._sleep_mode is not None:
            self._sleep_mode.adopt(model)
        return num_bytes

    def _make_model(self) -> None:
        """Create the uninitialized model. The weights of offloaded layers are on the host."""
        budget = self._context.config.cache.offload_bytes
        if not budget or self._device.type == "meta":
            super()._make_model()
            return
        sketch = type(self)(self._context)
        sketch._device, sketch._limits = torch.device("meta"), self._limits
        sketch._ranks = OneRank(size=self._context.world_size)
        with torch.device("meta"):
            sketch._make_model()
        self._offload = plan_offload(sketch._model, budget)
        with self._offload.constructing():
            super()._make_model()

    def _load_offloaded(self, model: nn.Module, loader: WeightLoader, plan: OffloadPlan) -> int:
        num_bytes = loader.load(model)
        check_finite(model)
        pack_offloaded(model, plan, self._device)
        runtime = cast("AcceleratorRuntime", self._runtime)
        module = torch.get_device_module(self._device.type)
        self._layers_on_host = OffloadedLayers(
            model, plan, module, runtime.pinned_empty, self._device
        )
        return num_bytes

    def _load_copy(self, loader: WeightLoader) -> nn.Module:
        """Return a new model, equal to this worker's model, with loaded and packed weights."""
        fresh = type(self)(self._context)
        fresh._device, fresh._limits, fresh._ranks = self._device, self._limits, self._ranks
        fresh._make_model()
        super().load_weights(fresh._model, loader)
        model: nn.Module = fresh._model
        return model

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory for the KV cache, uint8. With sleep mode `sleep` releases it."""
        if self._sleep_mode is None:
            return super().zeros(num_bytes)
        return self._sleep_mode.zeros(num_bytes)

    @torch.inference_mode()
    def sleep(self, level: int) -> None:
        """Release the memory of weights and cache.

        Raises ConfigError without sleep mode, CapacityError if the host has too little memory.
        """
        self._sleeping().sleep(level)

    @torch.inference_mode()
    def wake_up(self, tags: tuple[str, ...] = ()) -> None:
        """Allocate the memory of `tags` again. Restore or load the weights, and zero the cache.

        Raises CapacityError if the device has too little memory; then it can be called again.
        """
        self._sleeping().wake_up(tags, self._reload)

    def _reload(self) -> None:
        reload_weights(self._model, self._make_loader(), self._load_copy)

    def _sleeping(self) -> SleepMode:
        if self._sleep_mode is None:
            raise ConfigError("Sleep mode is not enabled; set enable_sleep_mode=True.")
        return self._sleep_mode

    def graph_capture(self) -> GraphCapture | None:
        """Return the object that captures graphs, if the device's torch module supports them.

        None with several ranks or offloaded weights: collective operations and copies in graphs are
        not tested.
        """
        if self._offload is not None:
            logger.warning("Steps run without graphs, because weights are offloaded.")
            return None
        module = torch.get_device_module(self._device.type)
        if not hasattr(module, "CUDAGraph"):
            return None
        if self._context.world_size > 1:
            logger.warning("Steps run without graphs, because several ranks share the model.")
            return None
        return AcceleratorGraphs(module)

    def shutdown(self) -> None:
        """Free weights and cache, and return their memory to the device."""
        if self.__dict__.pop("_layers_on_host", None) is not None:
            # The weights of the next step may still be copied. A failed device cannot be awaited.
            with suppress(RuntimeError):
                self._runtime.synchronize()
        ranks = self.__dict__.get("_ranks")
        if isinstance(ranks, ProcessRanks) and ranks.monitor is not None:
            ranks.monitor.close()  # other workers also exit now
        super().shutdown()
        self._sleep_mode = None
        if "_device" in self.__dict__:
            # A failed device cannot free memory; its failure has already been reported.
            with suppress(RuntimeError):
                cast("AcceleratorRuntime", self._runtime).release()

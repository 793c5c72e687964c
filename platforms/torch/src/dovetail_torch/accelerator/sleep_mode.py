"""Sleep mode: the weights and the KV cache release device memory, and later allocate it again.

Level 1 copies the weights to pinned host memory; level 2 discards them, and `wake_up` loads them
again. The KV cache is discarded and zeroed. Addresses do not change, so graphs remain valid.
Buffers of the model, position tables, workspaces and graphs keep their memory.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.accelerator.virtual_memory import SleepableMemory, VirtualMemory
from dovetail_torch.out_of_memory import explain_oom

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
_GIB = 1 << 30


class SleepMode:
    """The sleepable memory of one worker. weights, cache: the memory by purpose."""

    def __init__(self, runtime: AcceleratorRuntime, memory: VirtualMemory) -> None:
        """runtime: after `activate`. memory: the virtual memory of its device."""
        self.weights = SleepableMemory(memory, "the weights", runtime.release)
        self.cache = SleepableMemory(memory, "the KV cache", runtime.release)
        self._runtime = runtime
        self._saved: Sequence[torch.Tensor] | None = None

    def adopt(self, model: nn.Module) -> None:
        """Move the parameters of a loaded model to sleepable memory. Shared ones stay shared.

        A parameter becomes a new object of the same shape, strides and name.
        """
        moved: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in moved:
                    moved[id(parameter)] = self._moved(parameter)
                module.register_parameter(name, moved[id(parameter)])
        self._runtime.synchronize()
        self._runtime.release()

    def _moved(self, parameter: nn.Parameter) -> nn.Parameter:
        if not parameter.numel():
            return parameter
        last = sum(
            (size - 1) * stride
            for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        memory = self.weights.allocate((last + 1) * parameter.itemsize)
        moved = memory.view(parameter.dtype).as_strided(parameter.shape, parameter.stride())
        moved.copy_(parameter)
        return nn.Parameter(moved, requires_grad=False)

    def zeros(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed memory of the KV cache, uint8."""
        return self.cache.allocate(num_bytes).zero_()

    def sleep(self, level: int) -> None:
        """Release the memory of weights and cache. It is safe to repeat a failed call.

        Raises CapacityError, and releases nothing, if the host has too little memory for level 1.
        """
        self._runtime.synchronize()
        if level == 1 and self.weights.is_mapped:
            self._saved = self._save()
        before = self._runtime.memory_in_use_bytes()
        self.cache.unmap()
        self.weights.unmap()
        gc.collect()
        self._runtime.release()
        freed = before - self._runtime.memory_in_use_bytes()
        logger.info("Sleep level %d released %.2f GiB of device memory.", level, freed / _GIB)

    @explain_oom("a copy of the weights in host memory", "use sleep level 2")
    def _save(self) -> list[torch.Tensor]:
        contents = self.weights.contents()
        saved = [self._runtime.pinned_empty(content.numel()) for content in contents]
        for target, source in zip(saved, contents, strict=True):
            target.copy_(source, non_blocking=True)
        self._runtime.synchronize()
        return saved

    def wake_up(self, tags: Sequence[str], reload: Callable[[], None]) -> None:
        """Allocate the memory of `tags` again, and restore or reload the weights.

        tags: empty for all. reload: reloads the weights in place. It is safe to repeat a
        failed call. Raises CapacityError if the device has too little memory, and the errors of
        `reload`; memory that was not restored is then released.
        """
        tags = tags or (WEIGHTS, KV_CACHE)
        gc.collect()
        self._runtime.release()
        if WEIGHTS in tags and not self.weights.is_mapped:
            self.weights.map()
            try:
                self._restore(reload)
            except BaseException:
                self._runtime.synchronize()
                self.weights.unmap()
                raise
        if KV_CACHE in tags and not self.cache.is_mapped:
            self.cache.map()
            for memory in self.cache.contents():
                memory.zero_()
        self._runtime.synchronize()

    def _restore(self, reload: Callable[[], None]) -> None:
        if self._saved is None:
            reload()
            return
        for target, source in zip(self.weights.contents(), self._saved, strict=True):
            target.copy_(source, non_blocking=True)
        self._runtime.synchronize()
        self._saved = None

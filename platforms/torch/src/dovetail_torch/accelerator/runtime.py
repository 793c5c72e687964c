"""Any device with a module in torch as its workers need it: taking it, its memory, its queues.

Implements `dovetail_torch.device_runtime.DeviceRuntime`; platforms subclass it for what differs.
Memory is measured against what was free when the device was taken: what others had by then is
theirs and does not count against this process's share.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ContractError, PluginError
from dovetail_torch.accelerator.queues import AcceleratorQueues

if TYPE_CHECKING:
    from torch.distributed import Store

    from dovetail.interfaces.model import RankGroup


class AcceleratorRuntime:
    """One device of a type that torch has a module for.

    free_bytes_at_start: what the device had left when it was taken.
    """

    def __init__(self, device_type: str) -> None:
        self.free_bytes_at_start = 0
        self._device_type = device_type
        self._allocated_at_reset = 0

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Take the device of number `local_rank` and return it.

        num_threads: of the host, for what torch computes there; None for torch's choice. Raises
        PluginError where there is no such device or it cannot be taken.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        module = self._module = torch.get_device_module(self._device_type)
        num_devices = module.device_count()
        if not 0 <= local_rank < num_devices:
            raise self._refusal(local_rank, f"torch {torch.__version__} finds {num_devices}")
        try:
            module.set_device(local_rank)
            module.empty_cache()  # of an engine that was here before, in this process
            self.free_bytes_at_start, self._total_bytes = module.mem_get_info()
            self._queues = AcceleratorQueues(module, self.pinned_zeros)
        except RuntimeError as error:
            raise self._refusal(local_rank, str(error).partition("\n")[0]) from error
        return torch.device(self._device_type, local_rank)

    def _refusal(self, local_rank: int, reason: str) -> PluginError:
        return PluginError(
            f"The device {self._device_type}:{local_rank} was asked for and cannot be taken: "
            f"{reason}. Look at it with the tools of its driver, or choose another platform."
        )

    def total_memory_bytes(self) -> int:
        """Return the device's memory."""
        return self._total_bytes

    def memory_in_use_bytes(self) -> int:
        """Return what was taken since the device was, by anybody.

        What torch keeps of freed tensors does not count: it is there for the next ones.
        """
        free_bytes, _ = self._module.mem_get_info()
        kept_bytes = self._module.memory_reserved() - self._module.memory_allocated()
        return max(0, self.free_bytes_at_start - free_bytes - kept_bytes)

    def reset_peak(self) -> None:
        """Begin to measure a peak."""
        self._module.reset_peak_memory_stats()
        self._allocated_at_reset = self._module.memory_allocated()

    def peak_bytes(self) -> int:
        """Return the most that tensors have had since `reset_peak`, beyond what they had then.

        What libraries took for themselves meanwhile stays taken: `memory_in_use_bytes` has it.
        """
        return max(0, self._module.max_memory_allocated() - self._allocated_at_reset)

    def max_profile_tokens(self) -> int:
        """Return that every step is worth running: the device is fast."""
        return sys.maxsize

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""
        self._module.synchronize()

    def release(self) -> None:
        """Return to the device what torch keeps of freed tensors; after `activate`."""
        self._module.empty_cache()

    def asynchronous(self) -> AcceleratorQueues:
        """Return the device's queues."""
        return self._queues

    def pinned_zeros(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory, uint8, zeroed. Dear: for the start, not for a step."""
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> RankGroup:
        """Raise ContractError: a platform that declares "collectives" overrides this."""
        raise ContractError(
            f"{size} ranks were asked to share a model on {self._device_type!r}, whose platform "
            "does not join ranks; give tensor_parallel_size=1."
        )

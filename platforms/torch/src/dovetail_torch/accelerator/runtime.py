"""The device runtime of any device with a torch module: selection, memory, streams.

This module implements `dovetail_torch.device_runtime.DeviceRuntime`; platforms override methods if
their device differs. Memory in use is relative to the free memory at startup: memory that other
processes used before is not part of it.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from dovetail.errors import ContractError, PluginError
from dovetail_torch.accelerator.queues import AcceleratorQueues

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store

    from dovetail.interfaces.model import RankGroup
    from dovetail_torch.accelerator.virtual_memory import VirtualMemory
    from dovetail_torch.distributed.small_all_reduce import SmallAllReduce


class AcceleratorRuntime:
    """One device of a type for which torch has a module.

    free_bytes_at_start: free memory of the device before this process used it, if the driver can
    report it then; otherwise free memory when the device was selected.
    """

    def __init__(self, device_type: str) -> None:
        self.free_bytes_at_start = 0
        self._device_type = device_type
        self._allocated_at_reset = 0

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Select the device with index `local_rank` and return it.

        num_threads: number of torch threads on the host; None for torch's default. Raises
        PluginError if the device does not exist or cannot be used.
        """
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        module = self._module = torch.get_device_module(self._device_type)
        num_devices = module.device_count()
        if not 0 <= local_rank < num_devices:
            raise self._rejection(
                local_rank, f"torch {torch.__version__} finds {num_devices} devices"
            )
        unused_bytes = self.free_bytes_by_uuid()
        try:
            module.set_device(local_rank)
            module.empty_cache()  # memory of an earlier engine in this process
            properties = module.get_device_properties(local_rank)
            self._total_bytes = int(properties.total_memory)
            uuid = str(getattr(properties, "uuid", ""))
            self.free_bytes_at_start = max(unused_bytes.get(uuid, 0), self._free_bytes())
            self._queues = AcceleratorQueues(module, self.pinned_zeros)
        except RuntimeError as error:
            raise self._rejection(local_rank, str(error).partition("\n")[0]) from error
        return torch.device(self._device_type, local_rank)

    def free_bytes_by_uuid(self) -> Mapping[str, int]:
        """Return the free memory of devices by torch's uuid, without using them, or {} if unknown.

        A process that uses a device takes several hundred MiB of it for its context. Devices in the
        result count this memory as memory in use of this process.
        """
        return {}

    def _free_bytes(self) -> int:
        """Return the device's free memory, or what torch has not reserved if the driver fails."""
        try:
            return int(self._module.mem_get_info()[0])
        except (AttributeError, RuntimeError):
            # Some Intel drivers do not report it. Memory of other processes is then not counted.
            return self._total_bytes - int(self._module.memory_reserved())

    def _rejection(self, local_rank: int, reason: str) -> PluginError:
        return PluginError(
            f"The device {self._device_type}:{local_rank} was requested, but cannot be "
            f"used: {reason}. Check the device with its driver's tools, or choose another platform."
        )

    def total_memory_bytes(self) -> int:
        """Return the device's memory."""
        return self._total_bytes

    def memory_in_use_bytes(self) -> int:
        """Return the memory allocated since startup, by any process.

        Free memory that torch caches does not count, because it is reused.
        """
        kept_bytes = self._module.memory_reserved() - self._module.memory_allocated()
        return max(0, self.free_bytes_at_start - self._free_bytes() - kept_bytes)

    def reset_peak(self) -> None:
        """Start measuring the peak memory."""
        self._module.reset_peak_memory_stats()
        self._allocated_at_reset = self._module.memory_allocated()

    def peak_bytes(self) -> int:
        """Return the peak of tensor memory since `reset_peak`, minus the memory in use then.

        Memory of libraries is not included; `memory_in_use_bytes` includes it.
        """
        return max(0, self._module.max_memory_allocated() - self._allocated_at_reset)

    def max_profile_tokens(self) -> int:
        """Return `sys.maxsize` (no limit), because the device runs any step quickly."""
        return sys.maxsize

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""
        self._module.synchronize()

    def release(self) -> None:
        """Return torch's cached free memory to the device. Call it after `activate`."""
        self._module.empty_cache()

    def asynchronous(self) -> AcceleratorQueues:
        """Return the device's queues."""
        return self._queues

    def pinned_zeros(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory, uint8, zeroed.

        This is slow: call it at startup, not in a step.
        """
        return self.pinned_empty(num_bytes).zero_()

    def pinned_empty(self, num_bytes: int) -> torch.Tensor:
        """Return pinned host memory, uint8, with undefined contents."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def virtual_memory(self) -> VirtualMemory | None:
        """Return the device's virtual memory, after `activate`, or None if it has none.

        A platform whose worker provides "sleep" overrides this. Raises PluginError if the driver
        or this device does not support it.
        """
        return None

    def small_all_reduce(self, device: torch.device) -> SmallAllReduce:
        """Return a fast all-reduce for small tensors. Every rank calls this after `join`.

        Raises RuntimeError, with the reason, if it is not available.
        """
        raise RuntimeError(f"the platform of {device.type!r} does not provide it")

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> RankGroup:
        """Raise ContractError: a platform that declares "collectives" overrides this."""
        raise ContractError(
            f"tensor_parallel_size={size} is not supported on {self._device_type!r}: the "
            "platform does not support several ranks; set tensor_parallel_size=1."
        )

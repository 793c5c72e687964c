"""The bytes of a device that are left for the KV cache."""

from __future__ import annotations

from dovetail.errors import CapacityError
from dovetail_torch.device_runtime import DeviceRuntime

_GIB = 1 << 30


def bytes_for_cache(runtime: DeviceRuntime, share: float, step_bytes: int) -> int:
    """Return the unused bytes of the memory budget. Raise CapacityError if there are none.

    share: the budget, as a share of the device's memory. step_bytes: additional memory that the
    largest step needs.
    """
    budget = int(runtime.total_memory_bytes() * share)
    left = budget - runtime.memory_in_use_bytes() - step_bytes
    if left <= 0:
        raise CapacityError(
            f"gpu_memory_utilization={share} allows {budget / _GIB:.2f} GiB, but "
            f"{runtime.memory_in_use_bytes() / _GIB:.2f} GiB are in use and a step needs "
            f"{step_bytes / _GIB:.2f} GiB more; raise gpu_memory_utilization, free "
            "memory, or lower max_num_batched_tokens."
        )
    return left

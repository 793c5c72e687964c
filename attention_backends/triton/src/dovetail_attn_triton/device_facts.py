"""Cached properties of a device that determine the launches.

This module imports torch, not Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail_attn_triton.tiles import SharedMemory

# Compute capabilities · 10 with 99 KiB of shared memory per block; others have 163 KiB or more.
_MEDIUM_SHARED_MEMORY = frozenset({86, 87, 89, 120, 121})

# The interpreter runs programs one after another, each for milliseconds.
_INTERPRETED_PROCESSORS = 1


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Properties of a device.

    capability: compute capability · 10; 0 if the device has none. num_processors: multiprocessors.
    memory: shared memory of a thread block. architecture: such as "gfx942"; "" except for AMD.
    """

    capability: int
    num_processors: int
    memory: SharedMemory
    architecture: str = ""


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of `device`, from its driver."""
    if device.type == "cuda":
        result = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return DeviceFacts(
                capability=0,
                num_processors=result.multi_processor_count,
                memory=SharedMemory.SMALL,
                architecture=str(result.gcnArchName).partition(":")[0],
            )
        capability = 10 * result.major + result.minor
        is_medium = capability in _MEDIUM_SHARED_MEMORY
        return DeviceFacts(
            capability=capability,
            num_processors=result.multi_processor_count,
            memory=SharedMemory.MEDIUM if is_medium else SharedMemory.LARGE,
        )
    if device.type == "xpu":
        count = torch.xpu.get_device_properties(device).gpu_subslice_count
        return DeviceFacts(capability=0, num_processors=count, memory=SharedMemory.SMALL)
    return DeviceFacts(
        capability=0, num_processors=_INTERPRETED_PROCESSORS, memory=SharedMemory.LARGE
    )

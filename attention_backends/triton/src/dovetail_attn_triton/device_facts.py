"""Cached properties of a device that determine the launches. Imports torch, not Triton."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Compute capabilities · 10 with 99 KiB of shared memory per block; others have 163 KiB or more.
_LITTLE_SHARED_MEMORY = frozenset({86, 87, 89, 120, 121})

# The interpreter runs programs one after another, each for milliseconds.
_INTERPRETED_PROCESSORS = 1


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Properties of a device.

    capability: compute capability · 10; 0 if the device has none. num_processors: multiprocessors.
    has_large_tiles: whether a block has 163 KiB of shared memory or more.
    """

    capability: int
    num_processors: int
    has_large_tiles: bool


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the properties of `device`, from its driver."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        capability = 10 * found.major + found.minor
        return DeviceFacts(
            capability=capability,
            num_processors=found.multi_processor_count,
            has_large_tiles=capability not in _LITTLE_SHARED_MEMORY,
        )
    if device.type == "xpu":
        count = torch.xpu.get_device_properties(device).gpu_subslice_count
        return DeviceFacts(capability=0, num_processors=count, has_large_tiles=False)
    return DeviceFacts(capability=0, num_processors=_INTERPRETED_PROCESSORS, has_large_tiles=True)

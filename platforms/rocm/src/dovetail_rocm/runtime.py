"""The ROCm device runtime.

torch exposes ROCm under the names of CUDA. Ranks use RCCL, which torch's NCCL process group calls.
A device for which torch contains no code is rejected at startup. It has not been run on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.errors import PluginError
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.distributed.nccl_ranks import join_nccl

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch.distributed import Store

    from dovetail_torch.distributed.process_ranks import ProcessRanks


class ROCmRuntime(AcceleratorRuntime):
    """Runs tensors on one AMD device."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Select the device. Raise PluginError if torch contains no code for it."""
        device = super().activate(local_rank, num_threads=num_threads)
        architecture = str(torch.cuda.get_device_properties(device).gcnArchName)
        if not has_code(torch.cuda.get_arch_list(), architecture):
            raise PluginError(
                f"{torch.cuda.get_device_name(device)} is of architecture {architecture}, and "
                f"torch {torch.__version__} contains code for "
                f"{', '.join(torch.cuda.get_arch_list()) or 'no device'} only: install a torch "
                "build for this device."
            )
        return device

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> ProcessRanks:
        """Return the group of ranks, which uses RCCL for collective operations."""
        return join_nccl(store, rank=rank, size=size, timeout=timeout)


def has_code(arch_list: Sequence[str], architecture: str) -> bool:
    """Return whether a build of torch contains code that runs on a device.

    arch_list: as reported by torch. architecture: with the features of the device, such as
    "gfx942:sramecc+:xnack-"; code without features runs with all of them.
    """
    name, *features = architecture.split(":")
    for code in arch_list:
        made_for, *needed = code.split(":")
        if made_for == name and set(needed) <= set(features):
            return True
    return False

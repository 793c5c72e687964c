"""The CUDA device runtime.

Ranks use NCCL. A device for which torch contains no code is rejected at startup.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.errors import PluginError
from dovetail_cuda.driver import read_free_bytes
from dovetail_cuda.machine import look
from dovetail_cuda.symmetric_all_reduce import SymmetricAllReduce
from dovetail_cuda.virtual_memory import CUDAVirtualMemory
from dovetail_torch.accelerator.runtime import AcceleratorRuntime
from dovetail_torch.distributed.nccl_ranks import join_nccl

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from torch.distributed import Store

    from dovetail_torch.distributed.process_ranks import ProcessRanks


class CUDARuntime(AcceleratorRuntime):
    """Runs tensors on one CUDA device."""

    def __init__(self) -> None:
        super().__init__("cuda")

    def free_bytes_by_uuid(self) -> dict[str, int]:
        """Return the free memory of each visible card, as the driver reports it."""
        result = ((card.uuid, read_free_bytes(card.uuid)) for card in look().cards)
        return {uuid.removeprefix("GPU-"): free for uuid, free in result if free is not None}

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Select the device. Raise PluginError if torch contains no code for it."""
        device = super().activate(local_rank, num_threads=num_threads)
        capability = torch.cuda.get_device_capability(device)
        if not has_code(torch.cuda.get_arch_list(), capability):
            raise PluginError(
                f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}."
                f"{capability[1]}, and torch {torch.__version__} contains code for "
                f"{', '.join(torch.cuda.get_arch_list())} only: install a torch "
                "build for this device."
            )
        return device

    def virtual_memory(self) -> CUDAVirtualMemory:
        """Return the virtual memory of the device. Raise PluginError if it has none."""
        return CUDAVirtualMemory(self._module.current_device())

    def small_all_reduce(self, device: torch.device) -> SymmetricAllReduce:
        """Return the all-reduce of small tensors. Raise RuntimeError if it is not supported."""
        from torch.distributed import PrefixStore

        store, rank, size = self._joined
        own = PrefixStore("symmetric", store)
        return SymmetricAllReduce(own, rank=rank, size=size, device=device)

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> ProcessRanks:
        """Return the group of ranks, which uses NCCL for collective operations."""
        self._joined = store, rank, size
        return join_nccl(store, rank=rank, size=size, timeout=timeout)


def has_code(arch_list: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a build of torch contains code that runs on a device.

    arch_list: as reported by torch. Binary code ("sm_80") runs on later devices of its major
    version, intermediate code ("compute_90") on all later ones; code with a letter suffix
    ("sm_90a") runs on exactly that device.
    """
    for arch in arch_list:
        kind, _, number = arch.partition("_")
        digits = number.rstrip("af")
        if not digits.isdecimal():
            continue
        made_for = divmod(int(digits), 10)
        is_exact = made_for == capability
        is_older = digits == number and made_for <= capability
        if is_exact or (is_older and (kind == "compute" or made_for[0] == capability[0])):
            return True
    return False

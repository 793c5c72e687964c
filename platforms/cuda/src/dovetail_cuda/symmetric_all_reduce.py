"""All-reduce of small tensors through torch's symmetric memory, which all devices can read.

This module implements `dovetail_torch.distributed.small_all_reduce.SmallAllReduce`. It needs
devices that can access each other's memory (NVLink, or PCIe with peer access). It has not been run
on a device.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import torch

from dovetail_torch.distributed.small_all_reduce import MAX_BYTES

if TYPE_CHECKING:
    from torch.distributed import Store

ONE_SHOT = "symm_mem::one_shot_all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor"
"""The expected schema of the operator. Other schemas are rejected."""

_groups = count()


class SymmetricAllReduce:
    """All-reduces tensors through one buffer of `MAX_BYTES` for each rank."""

    def __init__(self, store: Store, *, rank: int, size: int, device: torch.device) -> None:
        """Allocate the buffer and exchange it with the other ranks. Every rank calls this.

        store: key-value store of the group. Raises RuntimeError if the devices or this version of
        torch do not support it.
        """
        # Imported here, because the import takes long and only several ranks need it.
        from torch._C._distributed_c10d import _SymmetricMemory

        schema = str(torch.ops.symm_mem.one_shot_all_reduce.default._schema)
        if schema != ONE_SHOT:
            raise RuntimeError(f"torch {torch.__version__} is not supported: {schema}")
        self._name = f"dovetail-{next(_groups)}"
        _SymmetricMemory.set_group_info(self._name, rank, size, store)
        self._buffer = _SymmetricMemory.empty_strided_p2p(
            (MAX_BYTES,), (1,), torch.uint8, device, self._name
        )
        self._handle = _SymmetricMemory.rendezvous(self._buffer, self._name)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of a contiguous tensor over all ranks, a new tensor."""
        # The operator waits for all ranks before it reads, and again before it ends, so the next
        # call may write to the buffer.
        shared = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self._name)
        return total

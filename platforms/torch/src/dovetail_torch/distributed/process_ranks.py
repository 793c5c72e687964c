"""The ranks of one engine as processes of a torch process group.

This module implements `dovetail.interfaces.RankGroup`. This module does not depend on devices,
layers or backends; ranks are joined in `joining`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dovetail.errors import PeerLostError
from dovetail_torch.distributed.rank_monitor import RankMonitor


class ProcessRanks:
    """One rank of several.

    group: runs collective operations on the device; this object is its only user. batch_invariant:
    true for up to two ranks. With more ranks, the order of a sum depends on the offset in the
    tensor. monitor: the monitor of the other ranks, if the device waits for them instead of the
    host; otherwise None.
    """

    def __init__(
        self, group: Any, *, rank: int, size: int, monitor: RankMonitor | None = None
    ) -> None:
        self.group = group
        self.monitor = monitor
        self.rank = rank
        self.size = size
        self.batch_invariant = size <= 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in the memory of `x` if it is contiguous."""
        x = x.contiguous()
        with self.reporting_loss():
            self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors concatenated along the last dimension, a new tensor."""
        x = x.contiguous()
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        with self.reporting_loss():
            self.group._allgather_base(gathered, x).wait()
        return gathered.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, in the memory of `x` if it is contiguous."""
        x = x.contiguous()
        with self.reporting_loss():
            self.group.broadcast(x, root=0).wait()
        return x

    @contextmanager
    def reporting_loss(self) -> Iterator[None]:
        """Convert errors of the process group in the block to PeerLostError."""
        try:
            yield
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise PeerLostError(
                f"rank {self.rank} of {self.size} cannot run collective operations with other "
                f"ranks ({cause}): one of them has exited or hangs; see its log."
            ) from error

"""The ranks of one engine as processes that exchange tensors through a process group of torch's.

Implements `dovetail.interfaces.RankGroup`. Depends on no device, no layer and no backend; how ranks
find each other is `joining`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dovetail.errors import PeerLostError


class ProcessRanks:
    """One rank of several.

    group: whose tensors are the device's, and of which this is the only user. batch_invariant: of
    two numbers the order does not matter; of more, groups add in an order that depends on the
    place in the tensor.
    """

    def __init__(self, group: Any, *, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size
        self.batch_invariant = size <= 2

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in the memory of `x` where it is contiguous."""
        x = x.contiguous()
        with self.reporting_loss():
            self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors side by side along the last dimension, a new tensor."""
        x = x.contiguous()
        gathered = [torch.empty_like(x) for _ in range(self.size)]
        with self.reporting_loss():
            self.group.allgather([gathered], [x]).wait()
        return torch.cat(gathered, dim=-1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, in the memory of `x` where it is contiguous."""
        x = x.contiguous()
        with self.reporting_loss():
            self.group.broadcast(x, root=0).wait()
        return x

    @contextmanager
    def reporting_loss(self) -> Iterator[None]:
        """Raise PeerLostError for whatever the group raises in the block."""
        try:
            yield
        except RuntimeError as error:
            cause = str(error).partition("\n")[0]
            raise PeerLostError(
                f"rank {self.rank} of {self.size} cannot exchange tensors with the others "
                f"({cause}): one of them has ended, or hangs; its own error tells why."
            ) from error

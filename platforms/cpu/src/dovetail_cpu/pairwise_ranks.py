"""Ranks on one machine's CPUs: every two exchange their tensors, and each adds up for itself.

One message each way instead of a ring's rounds, which is what a layer waits for: the sums of a step
are small. Each rank adds in the order of the ranks, so that all have the same bits, wherever in a
tensor a number stands. Exchanges (size - 1) tensors, more than a ring does beyond two ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail_torch.distributed.process_ranks import ProcessRanks

_TAG = 0
"""Messages between two ranks come in their order; there is nothing to tell apart."""


class PairwiseRanks(ProcessRanks):
    """One rank of several; `group` sends and receives."""

    def __init__(self, group: Any, *, rank: int, size: int) -> None:
        super().__init__(group, rank=rank, size=size)
        self.batch_invariant = True
        self._others = [other for other in range(size) if other != rank]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, a new tensor."""
        first, second, *others = self._exchange(x)
        total = first + second
        for part in others:
            total += part
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the ranks' tensors side by side along the last dimension, a new tensor."""
        return torch.cat(self._exchange(x), dim=-1)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor, in their order."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        parts[self.rank] = x
        with self.telling_loss():
            works = [self.group.recv([parts[other]], other, _TAG) for other in self._others]
            works += [self.group.send([x], other, _TAG) for other in self._others]
            for work in works:
                work.wait()
        return parts

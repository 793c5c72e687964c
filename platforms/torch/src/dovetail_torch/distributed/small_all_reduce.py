"""All-reduce of small tensors, through memory that all ranks can read.

A decode step all-reduces a few hundred KiB after every layer. Each rank writes its tensor to a
shared buffer, and one kernel per rank reads all buffers and adds them in the order of the ranks:
one collective operation instead of several steps along a ring. Larger tensors use the process
group.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch

from dovetail.interfaces import RankGroup
from dovetail_torch.distributed.process_ranks import ProcessRanks

logger = logging.getLogger(__name__)

MAX_BYTES = 512 << 10
"""For larger tensors the process group is faster, because it reduces them in parts."""
_MULTIPLE = 16
"""Sizes that the kernels support are multiples of this number of bytes."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class SmallAllReduce(Protocol):
    """All-reduces tensors of at most `MAX_BYTES` over the ranks of one group."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum, a new contiguous tensor. All ranks call it in the same order."""


class RanksWithSmallAllReduce(ProcessRanks):
    """A rank that all-reduces small tensors without the process group."""

    def __init__(self, ranks: ProcessRanks, fast: SmallAllReduce) -> None:
        """ranks: the rank that handles all other calls. fast: the all-reduce for small tensors."""
        super().__init__(ranks.group, rank=ranks.rank, size=ranks.size, monitor=ranks.monitor)
        self._fast = fast

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in the memory of `x` or in new memory."""
        # Every rank has a tensor of the same shape and dtype, so all ranks take the same branch.
        if x.nbytes > MAX_BYTES or x.nbytes % _MULTIPLE or not x.numel() or x.dtype not in _DTYPES:
            return super().all_reduce(x)
        with self.reporting_loss():
            return self._fast.all_reduce(x.contiguous())


def use_small_all_reduce(
    ranks: RankGroup, fast: SmallAllReduce | None, reason: str, device: torch.device
) -> RankGroup:
    """Return `ranks` with `fast` if every rank has it. Otherwise return `ranks` and warn.

    fast: None if it cannot be used. reason: why, or "". Called on all ranks.
    """
    assert isinstance(ranks, ProcessRanks), "the platform's runtime joins process groups"
    able = torch.tensor([float(fast is not None)], device=device)
    if fast is not None and float(ranks.all_reduce(able)) == ranks.size:
        return RanksWithSmallAllReduce(ranks, fast)
    if fast is None:
        ranks.all_reduce(able)
    logger.warning(
        "custom_all_reduce=True is ignored: every all-reduce uses the process group (%s).",
        reason or "another rank cannot use it",
    )
    return ranks

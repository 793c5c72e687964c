"""Ranks that run collective operations on the device with NCCL, or with RCCL under the same name.

This module does not depend on a platform: any torch build with the process group "nccl" can use it.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from dovetail_torch.distributed.process_ranks import ProcessRanks
from dovetail_torch.distributed.rank_monitor import monitor_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)


def join_nccl(store: Store, *, rank: int, size: int, timeout: timedelta) -> ProcessRanks:
    """Return the group of ranks. Raise RuntimeError if this torch build has no NCCL."""
    from torch import distributed  # slow to import; only several ranks need it

    if not distributed.is_nccl_available():
        raise RuntimeError(
            f"torch {torch.__version__} is built without NCCL; install a build with NCCL"
        )
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = distributed.ProcessGroupNCCL(store, rank, size, options)
    own = distributed.PrefixStore("peers", store)
    monitor = monitor_ranks(own, rank=rank, size=size, abort=lambda: _abort(group))
    return ProcessRanks(group, rank=rank, size=size, monitor=monitor)


def _abort(group: Any) -> None:
    """Abort all collective operations of the group, so that the device continues."""
    try:
        group.abort()
    except Exception:  # the monitor's thread has no caller
        logger.exception("The collective operation could not be aborted.")

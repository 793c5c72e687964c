"""The maximum size of a runner's steps, and the dtypes of its computation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The limits of a runner, fixed for its lifetime. Counts are numbers of requests and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: torch.dtype
    kv_cache_dtype: str
    device: torch.device

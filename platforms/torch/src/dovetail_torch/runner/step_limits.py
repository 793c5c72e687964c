"""What a runner may be given in one step, and in which numbers it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """Fixed for a runner's life. Counts in requests and tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: torch.dtype
    kv_cache_dtype: str
    device: torch.device

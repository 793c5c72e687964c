"""The maximum size of a runner's steps, and the dtypes of its computation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.kv_cache import SCALE_BYTES
from dovetail_torch.runner.cache_buffers import DTYPES

if TYPE_CHECKING:
    from dovetail.interfaces.engine_config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The limits of a runner, fixed for its lifetime. Counts are numbers of requests and tokens.

    kv_cache_scales: "token", "layer" or None, as in the configuration of the cache.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dtype: torch.dtype
    kv_cache_dtype: str
    device: torch.device
    kv_cache_scales: str | None = None

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of a token's keys in one head; 0 without per-token scales."""
        return SCALE_BYTES[self.kv_cache_dtype] if self.kv_cache_scales == "token" else 0

    @classmethod
    def of(cls, config: WorkerConfig, device: torch.device) -> StepLimits:
        """Return the limits that a configuration sets."""
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.model.max_model_len,
            dtype=DTYPES[config.model.dtype],
            kv_cache_dtype=config.cache.kv_cache_dtype,
            kv_cache_scales=config.cache.kv_cache_scales,
            device=device,
        )

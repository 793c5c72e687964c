"""Attention of encoders: each token attends to all tokens of its prompt, without a cache.

Prompts of the same length are computed together. This module does not depend on blocks or slots.
Dimensions: T tokens of the step, H query heads, K key-value heads, D head size; within a batch G
prompts of L tokens each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
    RotaryArgs,
)
from dovetail_attn_torch.metadata import Tokens, take

MAX_BATCH_TOKENS = 16384
"""Maximum number of tokens of the runs that are computed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualRuns:
    """Prompts of the same length.

    tokens: indices of their tokens in the step. length: L. mask_LL: True where a token attends to
    another; None if it attends to all.
    """

    tokens: Tokens
    length: int
    mask_LL: torch.Tensor | None


class BidirectionalBuilder(AttentionMetadataBuilder):
    """Groups the prompts of a step by their lengths."""

    def __init__(self, context: AttentionGroupContext) -> None:
        self._window = context.spec.sliding_window
        self._device = context.device

    def build(self, batch: AttentionBatch) -> tuple[EqualRuns, ...]:
        """Return the prompts by length. Raise ContractError for a part of a prompt."""
        if list(batch.query_lens) != list(batch.seq_lens):
            raise ContractError(
                "bidirectional attention needs whole prompts, but a request was scheduled with a "
                "part of its prompt; the scheduler must not chunk prompts or resume them from the "
                "prefix cache"
            )
        starts = list(accumulate(batch.query_lens, initial=0))
        by_length: defaultdict[int, list[int]] = defaultdict(list)
        for run, length in enumerate(batch.query_lens):
            by_length[length].append(starts[run])
        groups = []
        for length, firsts in by_length.items():
            mask_LL = self._mask(length)
            size = max(1, MAX_BATCH_TOKENS // length)
            for part in (firsts[i : i + size] for i in range(0, len(firsts), size)):
                tokens = self._tokens(part, length)
                groups.append(EqualRuns(tokens=tokens, length=length, mask_LL=mask_LL))
        return tuple(groups)

    def _tokens(self, firsts: list[int], length: int) -> Tokens:
        start, end = firsts[0], firsts[-1] + length
        if end - start == len(firsts) * length:
            return slice(start, end)
        firsts_G1 = torch.tensor(firsts, device=self._device).unsqueeze(1)
        return (firsts_G1 + torch.arange(length, device=self._device)).flatten()

    def _mask(self, length: int) -> torch.Tensor | None:
        if not 0 < self._window < length:
            return None
        positions_L = torch.arange(length, device=self._device)
        distance_LL = positions_L.unsqueeze(1) - positions_L
        mask_LL: torch.Tensor = distance_LL.abs() < self._window
        return mask_LL


class BidirectionalLayer(AttentionLayer):
    """Attention of one layer without a cache."""

    def __init__(self, context: AttentionLayerContext) -> None:
        """Store the context. Raise ConfigError for a feature that it does not support."""
        added = (context.sinks, context.alibi_slopes)
        if context.soft_cap or any(values_H is not None for values_H in added):
            raise ConfigError(
                f"{context.layer_name}: the attention backend 'torch' supports no soft cap, sinks "
                "or ALiBi with bidirectional attention"
            )
        self._scale = context.scale
        self._grouped = context.num_heads != context.num_kv_heads

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: tuple[EqualRuns, ...],
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write the attention of all prompts to `out_THD`. `kv_cache` is not used."""
        for runs in metadata:
            q_GHLD, k_GKLD, v_GKLD = (
                take(x, runs.tokens).unflatten(0, (-1, runs.length)).transpose(1, 2)
                for x in (q_THD, k_TKD, v_TKD)
            )
            out_GHLD = scaled_dot_product_attention(
                q_GHLD,
                k_GKLD,
                v_GKLD,
                attn_mask=runs.mask_LL,
                scale=self._scale,
                enable_gqa=self._grouped,
            )
            result = out_GHLD.transpose(1, 2).flatten(0, 1)
            if isinstance(runs.tokens, slice):
                out_THD[runs.tokens] = result
            else:
                out_THD.index_copy_(0, runs.tokens, result)

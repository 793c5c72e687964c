"""Attention of encoders: one native call computes all prompts of a step, without a cache.

This module does not depend on blocks or slots. Dimensions: T tokens of the step, H query heads, K
key-value heads, D head size; R requests.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import torch

from dovetail.errors import ConfigError, ContractError
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
)
from dovetail_cpu_kernels.attention import (
    AttentionBatchSize,
    BidirectionalArgs,
    bidirectional_operation,
)

# Packs the first 12 members of BidirectionalArgs in one call.
_CHANGING = struct.Struct("@12q")


@dataclass(frozen=True, slots=True, kw_only=True)
class BidirectionalMetadata:
    """The prompts of a step: their number, and the first token of each, int32 [R + 1]."""

    size: AttentionBatchSize
    query_start_R1: torch.Tensor


class BidirectionalBuilder(AttentionMetadataBuilder):
    """Checks that a step contains whole prompts."""

    def __init__(self, context: AttentionGroupContext) -> None:
        """Create the builder. The context is not used."""

    def build(self, batch: AttentionBatch) -> BidirectionalMetadata:
        """Return the prompts of the step. Raise ContractError for a part of a prompt."""
        if list(batch.query_lens) != list(batch.seq_lens):
            raise ContractError(
                "bidirectional attention needs whole prompts, but a request was scheduled with a "
                "part of its prompt; the scheduler must not chunk prompts or resume them from the "
                "prefix cache"
            )
        size = AttentionBatchSize(num_runs=batch.num_requests, num_tokens=sum(batch.query_lens))
        return BidirectionalMetadata(size=size, query_start_R1=batch.query_start_R1)


class BidirectionalLayer(AttentionLayer):
    """Attention of one layer without a cache. The argument struct is reused for each call."""

    def __init__(self, context: AttentionLayerContext) -> None:
        """Create the layer. Raise ConfigError for a feature that the kernel does not support."""
        added = (context.sinks, context.alibi_slopes)
        if context.soft_cap or any(values_H is not None for values_H in added):
            raise ConfigError(
                f"{context.layer_name}: the attention backend 'cpu' supports no soft cap, sinks or "
                "ALiBi with bidirectional attention"
            )
        self._operation = bidirectional_operation()
        self._args = BidirectionalArgs(
            num_heads=context.num_heads,
            num_kv_heads=context.num_kv_heads,
            head_size=context.head_size,
            window=context.sliding_window,
            scale=context.scale,
        )
        self._address = ctypes.addressof(self._args)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: BidirectionalMetadata,
        out_THD: torch.Tensor,
    ) -> None:
        """Write the attention of all prompts to `out_THD`. `kv_cache` is not used.

        bf16; q, k, v and out may be strided except in the last dimension.
        """
        q_stride, k_stride, v_stride = q_THD.stride(), k_TKD.stride(), v_TKD.stride()
        out_stride = out_THD.stride()
        _CHANGING.pack_into(
            self._args,
            0,
            q_THD.data_ptr(),
            k_TKD.data_ptr(),
            v_TKD.data_ptr(),
            out_THD.data_ptr(),
            q_stride[0],
            q_stride[1],
            k_stride[0],
            k_stride[1],
            v_stride[0],
            v_stride[1],
            out_stride[0],
            out_stride[1],
        )
        self._args.batch = ctypes.addressof(metadata.size)
        self._args.query_start = metadata.query_start_R1.data_ptr()
        self._operation(self._address)

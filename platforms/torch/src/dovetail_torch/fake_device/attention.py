"""Paged attention that never makes the host wait, for workers on the fake device.

It processes the runs one by one, with the lengths that the host knows; all indices are computed on
the device. It is simple and slow.
Legend: T tokens, H query heads, K key-value heads, D head size, B block size, S slots of the cache;
of a run: Q query tokens, L positions, M blocks.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.interfaces import (
    AttentionBackend,
    AttentionBatch,
    AttentionCapabilities,
    AttentionGroupContext,
    AttentionLayer,
    AttentionLayerContext,
    AttentionMetadataBuilder,
    FullAttentionSpec,
)


class NoWaitAttentionBackend(AttentionBackend):
    """Paged attention on any device; the cache has the dtype of the model."""

    name: ClassVar[str] = "no_wait"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset({"sliding_window"}),
    )

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return [N, B, 2, K, D]."""
        return (num_blocks, spec.block_size, 2, spec.num_kv_heads, spec.head_size)

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> NoWaitBuilder:
        """Return the attention metadata builder for a KV cache group."""
        return NoWaitBuilder()

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> NoWaitLayer:
        """Return the attention layer."""
        return NoWaitLayer(context)


class NoWaitBuilder(AttentionMetadataBuilder):
    """A metadata builder that returns batches unchanged."""

    def build(self, batch: AttentionBatch) -> AttentionBatch:
        """Return the batch."""
        return batch


class NoWaitLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, B, 2, K, D]."""

    def __init__(self, context: AttentionLayerContext) -> None:
        self._scale = context.scale
        self._window = context.sliding_window

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionBatch,
        out_THD: torch.Tensor,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`."""
        size = kv_cache.shape[1]
        slots_S2KD = kv_cache.view(-1, *kv_cache.shape[2:])
        slots_S2KD.select(1, 0).index_copy_(0, metadata.slot_mapping_T, k_TKD)
        slots_S2KD.select(1, 1).index_copy_(0, metadata.slot_mapping_T, v_TKD)
        offsets_B = torch.arange(size, device=q_THD.device)
        first = 0
        for run, length in enumerate(metadata.seq_lens):
            end = first + metadata.query_lens[run]
            blocks_M1 = metadata.block_table_RM[run, : -(-length // size)].long().unsqueeze(1)
            slots_L = (blocks_M1 * size + offsets_B).flatten()[:length]
            keys_values_L2KD = slots_S2KD.index_select(0, slots_L)
            out_THD[first:end] = self._attend(q_THD[first:end], keys_values_L2KD)
            first = end

    def _attend(self, q_QHD: torch.Tensor, keys_values_L2KD: torch.Tensor) -> torch.Tensor:
        length = len(keys_values_L2KD)
        positions_L = torch.arange(length, device=q_QHD.device)
        own_Q1 = positions_L[length - len(q_QHD) :].unsqueeze(1)
        seen_QL = positions_L <= own_Q1
        if self._window:
            seen_QL &= positions_L > own_Q1 - self._window
        keys_KLD, values_KLD = keys_values_L2KD.permute(1, 2, 0, 3).unbind(0)
        out_1HQD = scaled_dot_product_attention(
            q_QHD.transpose(0, 1).unsqueeze(0),
            keys_KLD.unsqueeze(0),
            values_KLD.unsqueeze(0),
            attn_mask=seen_QL,
            scale=self._scale,
            enable_gqa=q_QHD.shape[1] != keys_KLD.shape[0],
        )
        return out_1HQD[0].transpose(0, 1)

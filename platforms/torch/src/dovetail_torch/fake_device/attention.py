"""Paged attention that never makes the host wait, for workers on the fake device.

`GraphAttentionBackend` can also be captured: for a graph, it reads whole block tables and masks the
positions that do not exist.

It processes the requests one by one, with the lengths that the host knows; all indices are computed
on the device. It is simple and slow. Dimensions: T tokens, H query heads, K key-value heads, D head
size, B block size, S slots of the cache; for one request: Q query tokens, L positions, M blocks; R
requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from dovetail_torch.graphs.plan import GRAPHS


class NoWaitAttentionBackend(AttentionBackend):
    """Paged attention on any device. The cache has the dtype of the model."""

    name: ClassVar[str] = "no_wait"
    capabilities: ClassVar[AttentionCapabilities] = AttentionCapabilities(
        dtypes=frozenset({"float32", "bfloat16", "float16"}),
        features=frozenset({"sliding_window"}),
    )

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: FullAttentionSpec) -> tuple[int, ...]:
        """Return the shape [N, B, 2, K, D]."""
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
            # Blocks before the window may belong to other requests and contain NaN.
            is_seen_L = positions_L > length - len(q_QHD) - self._window
            keys_values_L2KD = torch.where(is_seen_L[:, None, None, None], keys_values_L2KD, 0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphMetadata:
    """Metadata of captured decodes. seq_lens_R: int32 [R], at a fixed address."""

    batch: AttentionBatch
    seq_lens_R: torch.Tensor


class GraphBuilder(NoWaitBuilder):
    """Builds metadata of eager steps and of captured decodes."""

    def build_for_graph(self, batch: AttentionBatch) -> GraphMetadata:
        """Return metadata with its own copy of the lengths."""
        return GraphMetadata(batch=batch, seq_lens_R=batch.seq_lens_R.clone())

    def update_for_replay(self, metadata: GraphMetadata, batch: AttentionBatch) -> None:
        """Copy the lengths of this step."""
        metadata.seq_lens_R.copy_(batch.seq_lens_R)


class GraphLayer(NoWaitLayer):
    """Attention whose operations depend only on the number of requests for captured decodes."""

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: GraphMetadata | AttentionBatch,
        out_THD: torch.Tensor,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`."""
        if not isinstance(metadata, GraphMetadata):
            super().forward(q_THD, k_TKD, v_TKD, kv_cache, metadata, out_THD)
            return
        batch, size = metadata.batch, kv_cache.shape[1]
        slots_S2KD = kv_cache.view(-1, *kv_cache.shape[2:])
        slots_S2KD.select(1, 0).index_copy_(0, batch.slot_mapping_T, k_TKD)
        slots_S2KD.select(1, 1).index_copy_(0, batch.slot_mapping_T, v_TKD)
        offsets_B = torch.arange(size, device=q_THD.device)
        slots_RL = (batch.block_table_RM.long().unsqueeze(2) * size + offsets_B).flatten(1)
        positions_L = torch.arange(slots_RL.shape[1], device=q_THD.device)
        ends_R1 = metadata.seq_lens_R.unsqueeze(1)
        seen_RL = positions_L < ends_R1
        if self._window:
            seen_RL &= positions_L >= ends_R1 - self._window
        keys_values = slots_S2KD.index_select(0, slots_RL.flatten())
        keys_values = keys_values.view(*slots_RL.shape, *slots_S2KD.shape[1:])
        keys_values = torch.where(seen_RL[:, :, None, None, None], keys_values, 0)
        keys_RKLD, values_RKLD = keys_values.permute(2, 0, 3, 1, 4).unbind(0)
        out_RH1D = scaled_dot_product_attention(
            q_THD.unsqueeze(2),
            keys_RKLD,
            values_RKLD,
            attn_mask=seen_RL[:, None, None],
            scale=self._scale,
            enable_gqa=q_THD.shape[1] != keys_RKLD.shape[1],
        )
        out_THD.copy_(out_RH1D.squeeze(2))


class GraphAttentionBackend(NoWaitAttentionBackend):
    """The attention of `NoWaitAttentionBackend`, with support for graphs."""

    name: ClassVar[str] = "graphs"
    capabilities: ClassVar[AttentionCapabilities] = replace(
        NoWaitAttentionBackend.capabilities,
        features=NoWaitAttentionBackend.capabilities.features | {GRAPHS},
    )

    @staticmethod
    def create_builder(context: AttentionGroupContext) -> GraphBuilder:
        """Return the attention metadata builder for a KV cache group."""
        return GraphBuilder()

    @staticmethod
    def create_layer(context: AttentionLayerContext) -> GraphLayer:
        """Return the attention layer."""
        return GraphLayer(context)

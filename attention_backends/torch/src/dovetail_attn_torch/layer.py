"""Attention of one layer: write the step's keys and values, then attend, batch by batch.

Everything that is the same for all layers is part of the metadata. With a soft cap, sinks, ALiBi or
values that are parts of keys, the explicit float32 formula is used, otherwise torch's
`scaled_dot_product_attention`, which would repeat such keys for each query head. This module does
not depend on blocks, requests or positions.

Dimensions: T tokens of the step, H query heads, K key-value heads, D head size, N blocks,
B block size, C cached vectors per token and head: key and value, or only the key; within a batch
G requests, Q query tokens per request and head, L positions, X query or
key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from dovetail.errors import ContractError
from dovetail.interfaces.attention import AttentionLayer, AttentionLayerContext
from dovetail_attn_torch.formula import ExplicitAttention
from dovetail_attn_torch.metadata import GatheredBatch, Tokens, TorchAttentionMetadata, take

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, GatheredBatch | None], torch.Tensor]
"""Maps (q_GXQD, k_GXLD, v_GXLD, batch) to the attention outputs, [G, X, Q, D].

batch: None for the whole prompt of one row, with causal attention.
"""


class TorchAttentionLayer(AttentionLayer):
    """Attention of one layer over a cache of shape [N, B, C, K, D]."""

    def __init__(self, context: AttentionLayerContext) -> None:
        self._name = context.layer_name
        self._groups = (context.num_kv_heads, context.num_heads // context.num_kv_heads)
        self._window = context.sliding_window
        self._scale = context.scale
        self._attend: Attend = self._attend_plain
        added = (context.sinks, context.alibi_slopes)
        is_added = any(values_H is not None for values_H in added)
        if context.soft_cap or context.value_size or is_added:
            self._attend = ExplicitAttention(
                scale=context.scale,
                soft_cap=context.soft_cap,
                sinks_H=context.sinks,
                slopes_H=context.alibi_slopes,
            )

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: TorchAttentionMetadata,
        out_THD: torch.Tensor,
    ) -> None:
        """Write k and v to the cache, attend causally, and write the result to `out_THD`.

        q, k, v and out may be strided except in the last dimension. Only the cache's slots of this
        step and `out_THD` change. Raises ContractError if the layer's window differs from its
        KV-cache group's.
        """
        if metadata.sliding_window != self._window:
            raise ContractError(
                f"{self._name} has a sliding window of {self._window}, but its KV-cache group has "
                f"{metadata.sliding_window}; put these layers into different groups"
            )
        _write(kv_cache, metadata.slots_T, (k_TKD, v_TKD)[: kv_cache.shape[2]])
        for batch in metadata.decodes:
            self._decode(q_THD, kv_cache, batch, out_THD)
        for batch in metadata.chunks:
            _gather(kv_cache, batch)
            out_1HQD = self._attend(
                _as_one_sequence(q_THD[batch.tokens]), batch.keys_GKLD, batch.values_GKLD, batch
            )
            _put(out_THD, batch.tokens, out_1HQD[0].transpose(0, 1))
        for tokens in metadata.prefills:
            q_1HQD, k_1KLD, v_1KLD = (_as_one_sequence(x[tokens]) for x in (q_THD, k_TKD, v_TKD))
            out_1HQD = self._attend(q_1HQD, k_1KLD, v_1KLD, None)
            _put(out_THD, tokens, out_1HQD[0].transpose(0, 1))

    def _decode(
        self,
        q_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        batch: GatheredBatch,
        out_THD: torch.Tensor,
    ) -> None:
        """Attend with one query token per request.

        Query heads that share a key-value head are treated as tokens of one head: keys and values
        are not repeated, and one matrix product replaces a vector product per query head.
        """
        _gather(kv_cache, batch)
        q_GKQD = take(q_THD, batch.tokens).unflatten(1, self._groups)
        out_GKQD = self._attend(q_GKQD, batch.keys_GKLD, batch.values_GKLD, batch)
        _put(out_THD, batch.tokens, out_GKQD.flatten(1, 2))

    def _attend_plain(
        self,
        q_GXQD: torch.Tensor,
        k_GXLD: torch.Tensor,
        v_GXLD: torch.Tensor,
        batch: GatheredBatch | None,
    ) -> torch.Tensor:
        return scaled_dot_product_attention(
            q_GXQD,
            k_GXLD,
            v_GXLD,
            attn_mask=None if batch is None else batch.mask_G1QL,
            is_causal=batch is None,
            scale=self._scale,
            enable_gqa=q_GXQD.shape[1] != k_GXLD.shape[1],
        )


def _write(
    cache_NBCKD: torch.Tensor, slots_T: torch.Tensor, vectors: Sequence[torch.Tensor]
) -> None:
    """Write the keys and values, [T, K, D] each, to the slots. Blocks may be strided."""
    for index, x_TKD in enumerate(vectors):
        own_NBKD = cache_NBCKD.select(2, index)
        if cache_NBCKD.is_contiguous():
            own_NBKD.flatten(0, 1).index_copy_(0, slots_T, x_TKD)
        else:
            own_NBKD.index_put_(_block_and_offset(cache_NBCKD, slots_T), x_TKD)


def _gather(cache_NBCKD: torch.Tensor, batch: GatheredBatch) -> None:
    """Copy the slots of `batch` to its memory. Blocks may be strided."""
    if cache_NBCKD.is_contiguous():
        slots_SCKD = cache_NBCKD.view(-1, *cache_NBCKD.shape[2:])
        torch.index_select(slots_SCKD, 0, batch.slots_S, out=batch.keys_values_SCKD)
    else:
        index = _block_and_offset(cache_NBCKD, batch.slots_S)
        batch.keys_values_SCKD.copy_(cache_NBCKD[index])


def _block_and_offset(
    cache_NBCKD: torch.Tensor, slots_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache_NBCKD.shape[1]
    return slots_S // block_size, slots_S % block_size


def _as_one_sequence(x_QXD: torch.Tensor) -> torch.Tensor:
    """Return the tensor of one request with the heads first: a view, [1, X, Q, D]."""
    return x_QXD.transpose(0, 1).unsqueeze(0)


def _put(out_THD: torch.Tensor, tokens: Tokens, result: torch.Tensor) -> None:
    if isinstance(tokens, slice):
        out_THD[tokens] = result
    else:
        out_THD.index_copy_(0, tokens, result)

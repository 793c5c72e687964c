"""Chunked attention with any backend: a step's requests are split at the boundaries of chunks.

A token sees only its own chunk (`ChunkedAttention`). The tokens of a request in one chunk are
passed to the backend as a separate, shorter request: its block table is the part of the request's
table that begins at the chunk. If a block has tokens of one chunk only, the first block of this
part begins at the chunk, too. So backends need no code for chunks, and read only the chunks that
tokens see. If a backend needs short requests before long ones, the tokens are reordered for the
backend, and its results are put back in the step's order.
Dimensions: T tokens, R requests, V parts of requests within a chunk, M and W block-table widths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayer,
    AttentionMetadataBuilder,
    RotaryArgs,
)
from dovetail_torch.attention.run_order import run_order


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedMetadata:
    """The metadata of a step for `ChunkedLayer`.

    divided: the backend's metadata of the split requests. order_T: int64; the tokens of the step
    in the order of these parts, or None if the order is the same.
    """

    divided: Any
    order_T: torch.Tensor | None


class ChunkedLayer(AttentionLayer):
    """Calls a backend's layer with the split requests."""

    def __init__(self, layer: AttentionLayer) -> None:
        self._layer = layer

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ChunkedMetadata,
        out_THD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> None:
        """Write k and v to the cache, and the attention within chunks to `out_THD`."""
        if rotary_args is not None:
            q_THD, k_TKD = rotary_args.apply(q_THD, k_TKD)
        order_T = metadata.order_T
        if order_T is None:
            self._layer.forward(q_THD, k_TKD, v_TKD, kv_cache, metadata.divided, out_THD)
            return
        q, k, v = (x.index_select(0, order_T) for x in (q_THD, k_TKD, v_TKD))
        out = torch.empty_like(out_THD)
        self._layer.forward(q, k, v, kv_cache, metadata.divided, out)
        out_THD.index_copy_(0, order_T, out)


class ChunkedBuilder(AttentionMetadataBuilder):
    """Splits each step's requests at the boundaries of chunks, for a backend's builder."""

    def __init__(self, backend: type[AttentionBackend], context: AttentionGroupContext) -> None:
        """Raise ConfigError for an unsupported block size.

        context: the context before the division.
        """
        block_size, chunk_size = context.spec.block_size, context.spec.chunk_size
        if chunk_size % block_size:
            raise ConfigError(
                f"the model's attention has chunks of {chunk_size} tokens, which is not a multiple "
                f"of the block size {block_size}. Choose a block_size that divides {chunk_size}"
            )
        self._chunk_size, self._block_size = chunk_size, block_size
        max_tokens, max_runs = context.max_num_batched_tokens, context.max_num_seqs
        # A run of n tokens has tokens of at most n // chunk_size + 2 chunks, and of at most n.
        max_parts = min(max_tokens, 2 * max_runs + max_tokens // chunk_size)
        divided = replace(
            context,
            max_num_seqs=max(max_runs, max_parts),
            max_model_len=min(context.max_model_len, chunk_size),
        )
        self._builder = backend.create_builder(divided)

    def build(self, batch: AttentionBatch) -> ChunkedMetadata:
        """Return the metadata of the split requests."""
        divided = split_runs(batch, self._chunk_size, self._block_size)
        order_T = None
        if threshold := self._builder.reorder_threshold:
            divided, order_T = order_runs(divided, threshold)
        return ChunkedMetadata(divided=self._builder.build(divided), order_T=order_T)


def split_runs(batch: AttentionBatch, chunk_size: int, block_size: int) -> AttentionBatch:
    """Return `batch` with its requests split at the boundaries of chunks.

    The order of the tokens does not change.
    chunk_size: tokens; a multiple of `block_size`. Requests without tokens may be omitted.
    """
    counts_R = np.asarray(batch.query_lens, np.int64)
    ends_R = np.asarray(batch.seq_lens, np.int64)
    starts_R = ends_R - counts_R
    first_R = starts_R // chunk_size
    parts_R = (ends_R - 1) // chunk_size - first_R + 1
    run_V = np.repeat(np.arange(len(counts_R)), parts_R)
    part_V = np.arange(len(run_V)) - np.repeat(np.cumsum(parts_R) - parts_R, parts_R)
    chunk_V = first_R[run_V] + part_V
    origin_V = chunk_V * chunk_size
    end_V = np.minimum(ends_R[run_V], origin_V + chunk_size)
    query_lens_V = end_V - np.maximum(starts_R[run_V], origin_V)
    seq_lens_V = end_V - origin_V
    query_start = np.concatenate((np.zeros(1, np.int64), np.cumsum(query_lens_V)))
    num_blocks_V = -(-seq_lens_V // block_size)
    column_W = np.arange(int(num_blocks_V.max(initial=0)))
    column_VW = (origin_V // block_size)[:, None] + column_W
    place_VW = run_V[:, None] * batch.block_table_RM.shape[1] + column_VW
    place_VW[column_W >= num_blocks_V[:, None]] = -1
    device = batch.block_table_RM.device
    place = torch.from_numpy(place_VW).to(device)
    table_VW = batch.block_table_RM.reshape(-1)[place.clamp(min=0)].masked_fill_(place < 0, 0)
    return AttentionBatch(
        query_start_R1=torch.from_numpy(query_start.astype(np.int32)).to(device),
        seq_lens_R=torch.from_numpy(seq_lens_V.astype(np.int32)).to(device),
        block_table_RM=table_VW,
        slot_mapping_T=batch.slot_mapping_T,
        query_lens=query_lens_V.tolist(),
        seq_lens=seq_lens_V.tolist(),
    )


def order_runs(batch: AttentionBatch, threshold: int) -> tuple[AttentionBatch, torch.Tensor | None]:
    """Return `batch` with requests of at most `threshold` tokens first, and its token order.

    The order is int64 [T], or None if the batch already has this order.
    """
    counts_R = np.asarray(batch.query_lens, np.int64)
    order_R = run_order(counts_R, (threshold,))
    if order_R is None:
        return batch, None
    own_counts_R = counts_R[order_R]
    starts_R = (np.cumsum(counts_R) - counts_R)[order_R]
    own_starts_R1 = np.concatenate((np.zeros(1, np.int64), np.cumsum(own_counts_R)))
    shift_R = starts_R - own_starts_R1[:-1]
    device = batch.block_table_RM.device
    order = torch.from_numpy(order_R).to(device)
    order_T = torch.from_numpy(np.arange(counts_R.sum()) + np.repeat(shift_R, own_counts_R))
    order_T = order_T.to(device)
    ordered = AttentionBatch(
        query_start_R1=torch.from_numpy(own_starts_R1.astype(np.int32)).to(device),
        seq_lens_R=batch.seq_lens_R.index_select(0, order),
        block_table_RM=batch.block_table_RM.index_select(0, order),
        slot_mapping_T=batch.slot_mapping_T.index_select(0, order_T),
        query_lens=own_counts_R.tolist(),
        seq_lens=[batch.seq_lens[run] for run in order_R.tolist()],
    )
    return ordered, order_T

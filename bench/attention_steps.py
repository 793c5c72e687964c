"""Batches with shuffled blocks and layer contexts for the attention benchmarks on the CPU.

The dtype is bfloat16. The script does not depend on a backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionLayerContext,
)
from dovetail.interfaces.kv_cache import FullAttentionSpec

DEVICE = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step to measure.

    contexts: number of context tokens of each request. query_len: number of new tokens of each.
    """

    label: str
    contexts: tuple[int, ...]
    query_len: int = 1


def make_batch(step: Step, block_size: int) -> tuple[AttentionBatch, int]:
    """Return the batch of a step, with blocks in random order, and the number of cache blocks."""
    num_rows, query_len = len(step.contexts), step.query_len
    seq_lens = tuple(context + query_len for context in step.contexts)
    width = -(-max(seq_lens) // block_size)
    num_blocks = num_rows * width + 1
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(num_blocks - 1, generator=generator).view(num_rows, width) + 1
    slots = [
        int(table[row, position // block_size]) * block_size + position % block_size
        for row, context in enumerate(step.contexts)
        for position in range(context, context + query_len)
    ]
    batch = AttentionBatch(
        query_start_R1=torch.arange(num_rows + 1, dtype=torch.int32) * query_len,
        seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
        block_table_RM=table.int(),
        slot_mapping_T=torch.tensor(slots),
        query_lens=(query_len,) * num_rows,
        seq_lens=seq_lens,
    )
    return batch, num_blocks


def group_context(batch: AttentionBatch, spec: FullAttentionSpec) -> AttentionGroupContext:
    """Return the context of a backend's metadata builder, with sizes for this batch."""
    return AttentionGroupContext(
        spec=spec,
        device=DEVICE,
        max_num_seqs=batch.num_requests,
        max_num_batched_tokens=sum(batch.query_lens),
        max_model_len=max(batch.seq_lens),
    )


def layer_context(heads: tuple[int, int, int]) -> AttentionLayerContext:
    """Return the context of a backend's layer. heads: query heads, key-value heads, head size."""
    num_heads, num_kv_heads, head_size = heads
    return AttentionLayerContext(
        layer_name="bench",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5,
        dtype=torch.bfloat16,
        device=DEVICE,
    )

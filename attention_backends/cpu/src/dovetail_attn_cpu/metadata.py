"""The metadata of a step, written to fixed addresses once for all layers of a group.

The kernels read it in place, so a recorded call reads the values of the current step. The builder
depends on the group's cache, but not on the query heads, scale and soft cap of a layer.

Dimensions: T tokens, R requests, M block-table width.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field

import torch

from dovetail.int_columns import increment
from dovetail.interfaces.attention import (
    AttentionBatch,
    AttentionGroupContext,
    AttentionMetadataBuilder,
)
from dovetail_cpu_kernels.attention import CACHE_BF16, CACHE_INT8, AttentionBatchSize

CACHE_KINDS = {"bfloat16": CACHE_BF16, "int8": CACHE_INT8}

# Memory for partial results if threads share a context: 8 MiB, used only if needed.
WORKSPACE_FLOATS = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class CPUAttentionMetadata:
    """The addresses of a step's metadata. The same object is used in every step.

    size: the step's numbers of requests and tokens. They define the valid parts of query_start_R1,
    seq_lens_R, block_table_RM (int32) and slot_mapping_T (int64). workspace: float32, unused
    between calls.
    """

    block_size: int
    cache_kind: int
    num_kv_heads: int
    head_size: int
    sliding_window: int
    query_start_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_table_RM: torch.Tensor
    slot_mapping_T: torch.Tensor
    workspace: torch.Tensor
    size: AttentionBatchSize = field(default_factory=AttentionBatchSize)


def _lazy_zeros(num_rows: int, width: int) -> torch.Tensor:
    """Return int32 zeros [num_rows, width] whose pages are allocated when first written to."""
    num_bytes = num_rows * width * torch.int32.itemsize
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.int32).view(num_rows, width)


class CPUMetadataBuilder(AttentionMetadataBuilder):
    """Copies each batch into its single `CPUAttentionMetadata`."""

    def __init__(self, context: AttentionGroupContext) -> None:
        spec, num_rows = context.spec, context.max_num_seqs
        width = -(-context.max_model_len // spec.block_size)
        self._metadata = CPUAttentionMetadata(
            block_size=spec.block_size,
            cache_kind=CACHE_KINDS[spec.dtype],
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            sliding_window=spec.sliding_window,
            query_start_R1=torch.zeros(num_rows + 1, dtype=torch.int32),
            seq_lens_R=torch.zeros(num_rows, dtype=torch.int32),
            block_table_RM=_lazy_zeros(num_rows, width),
            slot_mapping_T=torch.zeros(context.max_num_batched_tokens, dtype=torch.int64),
            workspace=torch.empty(WORKSPACE_FLOATS, dtype=torch.float32),
        )
        self._query_start_R1 = self._metadata.query_start_R1.numpy()
        self._seq_lens_R = self._metadata.seq_lens_R.numpy()
        self._block_table_RM = self._metadata.block_table_RM.numpy()
        self._slot_mapping_T = self._metadata.slot_mapping_T.numpy()

    def build(self, batch: AttentionBatch) -> CPUAttentionMetadata:
        """Return this step's metadata, in the memory of the previous step. Only reads `batch`."""
        metadata, num_runs = self._metadata, batch.num_requests
        num_tokens = len(batch.slot_mapping_T)
        # Copied through numpy views: tensor operations would cost more than the copy.
        table_RM = batch.block_table_RM.numpy()
        width = min(table_RM.shape[1], self._block_table_RM.shape[1])
        self._query_start_R1[: num_runs + 1] = batch.query_start_R1.numpy()
        self._seq_lens_R[:num_runs] = batch.seq_lens_R.numpy()
        self._block_table_RM[:num_runs, :width] = table_RM[:, :width]
        self._slot_mapping_T[:num_tokens] = batch.slot_mapping_T.numpy()
        metadata.size.num_runs = num_runs
        metadata.size.num_tokens = num_tokens
        return metadata

    def advance(self) -> None:
        """Advance each request of the last metadata by one token.

        Each must have one token in the step.
        """
        num_runs = self._metadata.size.num_runs
        increment(memoryview(self._seq_lens_R), num_runs)
        increment(memoryview(self._slot_mapping_T), num_runs)

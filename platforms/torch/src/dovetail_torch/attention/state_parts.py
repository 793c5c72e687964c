"""Finds the blocks of states that the tokens of a step read and write.

See `dovetail.interfaces.kv_cache.StateSpec` for the rules. Which blocks they are is known on the
device; how the tokens are divided, on the host.
Dimensions: T tokens, R requests, N parts, M width of a block table.
"""

from __future__ import annotations

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBatch, AttentionMetadataBuilder
from dovetail.interfaces.kv_cache import StateSpec
from dovetail.interfaces.ops import StateParts


class StatePartsBuilder(AttentionMetadataBuilder):
    """Builds the parts of each step for the states of one KV-cache group."""

    def __init__(self, spec: StateSpec) -> None:
        """spec: a state with snapshots."""
        assert spec.snapshots, "the table of a state without snapshots has no positions"
        self._block_size = spec.block_size

    def build(self, batch: AttentionBatch) -> StateParts:
        """Return the parts of a step."""
        return divide_tokens(batch, self._block_size)


def divide_tokens(batch: AttentionBatch, block_size: int) -> StateParts:
    """Divide the tokens of each request at the ends of blocks. Each request has at least one token.

    block_size: tokens of a block of the group.
    """
    ends_R = np.asarray(batch.seq_lens, np.int64)
    starts_R = ends_R - np.asarray(batch.query_lens, np.int64)
    first_R = starts_R // block_size
    num_parts_R = (ends_R - 1) // block_size - first_R + 1
    run_N = np.repeat(np.arange(len(ends_R)), num_parts_R)
    block_N = np.arange(len(run_N)) - np.repeat(np.cumsum(num_parts_R) - num_parts_R, num_parts_R)
    block_N += first_R[run_N]
    start_N = np.maximum(starts_R[run_N], block_N * block_size)
    sizes_N = np.minimum(ends_R[run_N], (block_N + 1) * block_size) - start_N
    table_RM = batch.block_table_RM
    index_2N = np.stack((np.maximum(start_N - 1, 0) // block_size, block_N))
    index_2N += run_N * table_RM.shape[1]
    is_new = torch.from_numpy(start_N == 0).to(table_RM.device)
    index = torch.from_numpy(index_2N).to(table_RM.device)
    reads_N, writes_N = table_RM.reshape(-1)[index].to(torch.int64)
    return StateParts(
        sizes=tuple(sizes_N.tolist()),
        num_parts=tuple(num_parts_R.tolist()),
        reads_N=reads_N.masked_fill(is_new, -1),
        writes_N=writes_N,
    )

"""Finds the blocks of states that the tokens of a step read and write.

See `dovetail.interfaces.kv_cache.StateSpec` for the rules. The device knows which blocks these are;
the host knows how the tokens are split. Dimensions: T tokens, R requests, N parts, M width of a
block table.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBatch, AttentionMetadataBuilder
from dovetail.interfaces.kv_cache import StateSpec
from dovetail.interfaces.ops import StateParts, StatePartsMemory
from dovetail_torch.lazy_memory import is_host_memory
from dovetail_torch.runner.step_limits import StepLimits


class StatePartsBuilder(AttentionMetadataBuilder):
    """Builds the parts of each step for the states of one KV-cache group.

    On devices that compute in host memory, the parts of all steps are in the same memory, so that
    recorded steps read the current ones, and the last step can be advanced.
    """

    def __init__(self, spec: StateSpec, limits: StepLimits) -> None:
        """spec: a state with snapshots. limits: the limits of a step."""
        assert spec.snapshots, "the table of a state without snapshots has no positions"
        self._block_size = spec.block_size
        self._memory: StatePartsMemory | None = None
        self._num_parts = 0
        if is_host_memory(limits.device):
            num_tokens, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
            # n tokens have parts in at most n // block_size + 2 blocks, and at most n parts.
            max_parts = min(num_tokens, 2 * num_seqs + num_tokens // spec.block_size)
            self._memory = _allocate(num_seqs, max_parts)

    def build(self, batch: AttentionBatch) -> StateParts:
        """Return the parts of a step."""
        parts, memory = split_tokens(batch, self._block_size), self._memory
        if memory is None:
            return parts
        self._num_parts = num_parts = len(parts.sizes)
        # Numpy, because tensor operations would cost more than the copies.
        memory.num_requests_1.numpy()[0] = len(parts.num_parts)
        memory.num_parts_R.numpy()[: len(parts.num_parts)] = parts.num_parts
        memory.sizes_N.numpy()[:num_parts] = parts.sizes
        memory.reads_N.numpy()[:num_parts] = parts.reads_N.numpy()
        memory.writes_N.numpy()[:num_parts] = parts.writes_N.numpy()
        return replace(
            parts,
            reads_N=memory.reads_N[:num_parts],
            writes_N=memory.writes_N[:num_parts],
            memory=memory,
        )

    def advance(self) -> None:
        """Advance each request of the last parts by one token, in the block of its last token."""
        assert self._memory is not None, "only parts in host memory are advanced"
        written_N = self._memory.writes_N.numpy()[: self._num_parts]
        self._memory.reads_N.numpy()[: self._num_parts] = written_N


def _allocate(max_requests: int, max_parts: int) -> StatePartsMemory:
    # Not inference tensors: `advance` is called outside of inference mode.
    num_requests_1, num_parts_R, sizes_N, reads_N, writes_N = (
        torch.from_numpy(np.zeros(size, np.int64))
        for size in (1, max_requests, max_parts, max_parts, max_parts)
    )
    return StatePartsMemory(
        num_requests_1=num_requests_1,
        num_parts_R=num_parts_R,
        sizes_N=sizes_N,
        reads_N=reads_N,
        writes_N=writes_N,
    )


def split_tokens(batch: AttentionBatch, block_size: int) -> StateParts:
    """Split the tokens of each request at the ends of blocks. Each request has at least one token.

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

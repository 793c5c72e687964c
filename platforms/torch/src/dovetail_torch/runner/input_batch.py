"""Convert a plan and the rows to the tensors of one step.

Indices are computed on the host in whole columns, never request by request, and copied once.
Dimensions: T tokens of the step, R scheduled requests, S of them sample, M blocks of the longest
request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.interfaces import AttentionBatch
from dovetail.plan import SchedulerOutput
from dovetail_torch.attention.run_order import first_tokens, in_order, run_order
from dovetail_torch.positions import PositionTables
from dovetail_torch.runner.device_columns import Array, DeviceColumn
from dovetail_torch.runner.request_rows import RequestRows


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One gathered step.

    Tensors are on the device, and the next step's tensors reuse their memory.
    input_ids_T, positions_T: int64. attention: one entry per KV-cache group. last_S: int64; index
    in the step of the last token of each request that samples. sampling_runs: int64 [S]; positions
    of these requests in the plan. sampling_rows: their rows. rows, ends: int64 [R]; each request's
    row, and the position after its last token. first_R: int64 [R]; the index of each request's
    first token in the step. Requests are in plan order, except in `attention`: see `run_order`.
    numbers: the host's numbers for sampling, if they were sent with the inputs; else None.
    """

    plan: SchedulerOutput
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    last_S: torch.Tensor
    sampling_runs: Array
    sampling_rows: list[int]
    rows: Array
    ends: Array
    first_R: Array
    numbers: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The limits and layout of every step.

    block_sizes: tokens per block, for each KV-cache group. max_num_tokens: maximum per step.
    thresholds: the argument of `run_order`.
    """

    block_sizes: tuple[int, ...]
    max_num_tokens: int
    thresholds: Sequence[int] = ()


class InputGatherer:
    """Computes the tensors of each step.

    Tensors with one number per token or request keep their address.
    """

    def __init__(
        self, rows: RequestRows, shape: StepShape, tables: PositionTables | None = None
    ) -> None:
        """tables: position tables of the model, filled before the steps that need them."""
        block_sizes, max_num_tokens = shape.block_sizes, shape.max_num_tokens
        self._thresholds = shape.thresholds
        device = rows.token_ids_RL.device
        self._rows = rows
        self._block_sizes = block_sizes
        self._input_ids_T = DeviceColumn(max_num_tokens, torch.int64, device)
        self._positions_T = DeviceColumn(max_num_tokens, torch.int64, device)
        self._seq_lens_R = DeviceColumn(rows.num_rows, torch.int32, device)
        self._last_S = DeviceColumn(rows.num_rows, torch.int64, device)
        self._query_start_R1 = DeviceColumn(rows.num_rows + 1, torch.int32, device)
        self._slots_T = [DeviceColumn(max_num_tokens, torch.int64, device) for _ in block_sizes]
        self._counted = np.arange(rows.num_rows + 1)
        self._tables = tables or PositionTables()
        # Steps that continue this step stay within the blocks of its last tokens.
        self._num_ahead = max(block_sizes, default=0)

    def take(self, plan: SchedulerOutput) -> InputBatch | None:
        """Apply the plan to the rows and return the step's tensors. None for an empty plan."""
        self._rows.apply(plan)
        return None if plan.empty else self.gather(plan)

    def append(self, batch: InputBatch, token_ids_S: torch.Tensor) -> None:
        """Write the tokens sampled for `batch` to their rows."""
        runs = batch.sampling_runs
        if len(runs):
            self._rows.append(batch.rows[runs], batch.ends[runs], token_ids_S)

    def gather(self, plan: SchedulerOutput) -> InputBatch:
        """Return the tensors of `plan`, which has been applied and is not empty."""
        rows, num_tokens, num_runs = self._rows, plan.total_num_tokens, len(plan.rows)
        runs = np.array(plan.rows, np.int64)
        starts = np.array(plan.starts, np.int64)
        sampling_runs = np.flatnonzero(np.asarray(plan.samples))
        query_lens: Sequence[int] = plan.num_tokens
        if num_tokens == num_runs:  # each run has one token, as in a step of decodes
            own_runs, own_ends, token_rows, positions = runs, starts + 1, runs, starts
            first_R1 = self._counted[: num_runs + 1]
            ends, first_R, last_R = own_ends, first_R1[:-1], first_R1[:-1]
        else:
            counts = np.array(plan.num_tokens, np.int64)
            ends = starts + counts
            order = run_order(counts, self._thresholds)
            own_runs, own_starts, own_ends, own_counts = in_order(
                (runs, starts, ends, counts), order
            )
            query_lens = query_lens if order is None else own_counts.tolist()
            first_R1 = np.concatenate((np.zeros(1, np.int64), np.cumsum(own_counts)))
            token_rows = np.repeat(own_runs, own_counts)
            positions = np.arange(num_tokens) + np.repeat(own_starts - first_R1[:-1], own_counts)
            first_R = first_tokens(first_R1, order)
            last_R = first_R + counts - 1
        return InputBatch(
            plan=plan,
            input_ids_T=rows.tokens.read(
                token_rows * rows.max_model_len + positions, self._input_ids_T
            ),
            positions_T=self._positions_T.fill(positions),
            attention=self._attention(
                (own_runs, own_ends, query_lens), first_R1, (token_rows, positions)
            ),
            last_S=self._last_S.fill(last_R[sampling_runs]),
            sampling_runs=sampling_runs,
            sampling_rows=runs[sampling_runs].tolist(),
            rows=runs,
            ends=ends,
            first_R=first_R,
        )

    def num_steps_to_border(self, batch: InputBatch) -> int:
        """Return how many more tokens fit into the last block of every request."""
        return min(int((-batch.ends % size).min()) for size in self._block_sizes)

    def ends_at(self, positions: array[int]) -> bool:
        """Return whether the last gathered step's requests end at `positions`, int32, in order."""
        return self._seq_lens_R.begins_with(positions)

    def advance(self, token_ids: array[int]) -> None:
        """Advance the last gathered step, of one token per request, to its next positions.

        token_ids: the tokens at the next positions. Builders update their copies of slots.
        """
        num_runs = len(token_ids)
        self._input_ids_T.fill(np.asarray(token_ids))
        self._positions_T.increment(num_runs)
        self._seq_lens_R.increment(num_runs)

    def _attention(
        self,
        ordered: tuple[Array, Array, Sequence[int]],
        first_R1: Array,
        tokens: tuple[Array, Array],
    ) -> tuple[AttentionBatch, ...]:
        """Return each KV-cache group's attention batch.

        ordered: rows, ends and numbers of tokens of the requests. tokens: row and position of each.
        """
        runs, ends, query_lens = ordered
        token_rows, positions = tokens
        device = self._rows.token_ids_RL.device
        query_start_R1 = self._query_start_R1.fill(first_R1)
        seq_lens_R = self._seq_lens_R.fill(ends)
        seq_lens = ends.tolist()
        longest = max(seq_lens)
        if longest + self._num_ahead > self._tables.num_ready:
            self._tables.grow(longest + self._num_ahead)
        batches = []
        groups = zip(self._rows.block_tables, self._block_sizes, self._slots_T, strict=True)
        for table, size, slots_T in groups:
            blocks = positions // size
            slots = table[token_rows, blocks] * np.int64(size) + (positions - blocks * size)
            batch = AttentionBatch(
                query_start_R1=query_start_R1,
                seq_lens_R=seq_lens_R,
                block_table_RM=torch.from_numpy(table[runs, : -(-longest // size)]).to(device),
                slot_mapping_T=slots_T.fill(slots),
                query_lens=query_lens,
                seq_lens=seq_lens,
            )
            batches.append(batch)
        return tuple(batches)

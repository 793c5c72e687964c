"""Convert a plan to the tensors of one step on an asynchronous device.

The host packs the few values of a step (rows, first positions, borders; joining requests and new
blocks; numbers for sampling) and sends them in one copy; everything else is computed on the device
from the rows stored there. Does not depend on the model or the sampler.
Legend: T tokens of the step, R runs, S runs that sample, M blocks of the longest run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.interfaces import AttentionBatch
from dovetail.interfaces.ops import StepColumns
from dovetail.plan import SchedulerOutput
from dovetail_torch.lazy_memory import lazy_zeros
from dovetail_torch.positions import PositionTables
from dovetail_torch.runner.device_rows import DeviceRows
from dovetail_torch.runner.input_batch import InputBatch
from dovetail_torch.runner.staging import Array, Staging

PrepareInputs = Callable[[StepColumns], None]
"""The type of the op provider's `PreparesInputs.prepare_inputs`."""

SamplingNumbers = Callable[[Sequence[int]], tuple[Array, ...]]
"""A function from the sampling rows to the numbers that the sampler needs from the host."""

_NUM_COLUMNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch(InputBatch):
    """The inputs of one step.

    flat_index_S: int64; flat indices of the sampled tokens in `token_ids_RL`.
    """

    flat_index_S: torch.Tensor


class DeviceInputs:
    """Computes each step's tensors. Tensors with one number per token or run keep their address."""

    def __init__(
        self,
        rows: DeviceRows,
        staging: Staging,
        *,
        block_sizes: tuple[int, ...],
        max_num_tokens: int,
        prepare_inputs: PrepareInputs,
        sampling_numbers: SamplingNumbers,
        tables: PositionTables | None = None,
    ) -> None:
        """block_sizes: tokens per block, for each KV-cache group. max_num_tokens: maximum per step.

        tables: position tables of the model, filled before the steps that need them.
        """
        self._rows = rows
        self._staging = staging
        self._block_sizes = block_sizes
        self._prepare_inputs = prepare_inputs
        self._sampling_numbers = sampling_numbers
        self._position_tables = tables or PositionTables()
        device = rows.token_ids_RL.device

        def column(size: int, dtype: torch.dtype) -> torch.Tensor:
            return lazy_zeros((size,), dtype, device)

        self._input_ids_T = column(max_num_tokens, torch.int64)
        self._positions_T = column(max_num_tokens, torch.int64)
        self._seq_lens_R = column(rows.num_rows, torch.int32)
        self._query_start_R1 = column(rows.num_rows + 1, torch.int32)
        self._slots_T = [column(max_num_tokens, torch.int64) for _ in block_sizes]
        self._tables = [column(table.numel(), torch.int32) for table in rows.block_tables]

    def take(self, plan: SchedulerOutput) -> InputBatch | None:
        """Apply the plan to the rows and return the tensors of its runs; None if it has none."""
        changes = self._rows.changes(plan)
        if plan.empty:
            if changes.arrays:
                self._rows.apply(changes, self._staging.send(changes.arrays))
            return None
        rows, starts, counts = map(np.asarray, (plan.rows, plan.starts, plan.num_tokens))
        first_R1 = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=first_R1[1:])
        ends = starts + counts
        sampling_runs = np.flatnonzero(np.asarray(plan.samples))
        own_rows = rows[sampling_runs]
        sampling_rows = own_rows.tolist()
        last = first_R1[1:][sampling_runs] - np.int64(1)
        flat_index = own_rows * np.int64(self._rows.max_model_len) + ends[sampling_runs]
        numbers = self._sampling_numbers(sampling_rows)
        sent = self._staging.send(
            (rows, starts, first_R1, last, flat_index, *numbers, *changes.arrays)
        )
        end = _NUM_COLUMNS + len(numbers)
        self._rows.apply(changes, sent[end:])
        rows_R, starts_R, query_start_R1, last_S, flat_index_S = sent[:_NUM_COLUMNS]
        seq_lens = ends.tolist()
        longest = max(seq_lens)
        if longest > self._position_tables.num_ready:
            self._position_tables.grow(longest)
        columns = self._columns(
            (rows_R, starts_R, query_start_R1), plan, longest, int(counts.max())
        )
        self._prepare_inputs(columns)
        return DeviceBatch(
            plan=plan,
            input_ids_T=columns.input_ids_T,
            positions_T=columns.positions_T,
            attention=_attention(columns, plan, seq_lens),
            last_S=last_S,
            sampling_runs=sampling_runs,
            sampling_rows=sampling_rows,
            rows=rows,
            ends=ends,
            first_R1=first_R1,
            numbers=sent[_NUM_COLUMNS:end],
            flat_index_S=flat_index_S,
        )

    def append(self, batch: InputBatch, token_ids_S: torch.Tensor) -> None:
        """Write the tokens sampled for `batch`, int32, to their rows."""
        assert isinstance(batch, DeviceBatch), "the batch was not created by this object"
        self._rows.token_ids_RL.view(-1).index_copy_(0, batch.flat_index_S, token_ids_S)

    def _columns(
        self,
        sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        plan: SchedulerOutput,
        longest_row: int,
        longest_run: int,
    ) -> StepColumns:
        """Return the columns for the device. sent: rows, first positions and starts of the runs."""
        rows, num_tokens, num_runs = self._rows, plan.total_num_tokens, len(plan.rows)
        widths = [-(-longest_row // size) for size in self._block_sizes]
        return StepColumns(
            rows_R=sent[0],
            starts_R=sent[1],
            query_start_R1=self._query_start_R1[: num_runs + 1].copy_(sent[2]),
            token_ids_RL=rows.token_ids_RL,
            block_tables=rows.block_tables,
            block_sizes=self._block_sizes,
            input_ids_T=self._input_ids_T[:num_tokens],
            positions_T=self._positions_T[:num_tokens],
            seq_lens_R=self._seq_lens_R[:num_runs],
            slots_T=tuple(slots_T[:num_tokens] for slots_T in self._slots_T),
            block_tables_RM=tuple(
                memory[: num_runs * width].view(num_runs, width)
                for memory, width in zip(self._tables, widths, strict=True)
            ),
            num_tokens=num_tokens,
            longest=longest_run,
        )


def _attention(
    columns: StepColumns, plan: SchedulerOutput, seq_lens: list[int]
) -> tuple[AttentionBatch, ...]:
    return tuple(
        AttentionBatch(
            query_start_R1=columns.query_start_R1,
            seq_lens_R=columns.seq_lens_R,
            block_table_RM=block_table_RM,
            slot_mapping_T=slots_T,
            query_lens=plan.num_tokens,
            seq_lens=seq_lens,
        )
        for slots_T, block_table_RM in zip(columns.slots_T, columns.block_tables_RM, strict=True)
    )

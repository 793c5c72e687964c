"""Convert a plan to the tensors of one step on an asynchronous device.

The host packs the few values of a step (rows, first positions, boundaries; new requests and new
blocks; numbers for sampling) and sends them in one copy; everything else is computed on the device
from the rows stored there. This module does not depend on the model or the sampler.
Dimensions: T tokens of the step, R scheduled requests, S of them sample, M blocks of the longest
request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.interfaces import AttentionBatch
from dovetail.interfaces.ops import StepColumns
from dovetail.plan import SchedulerOutput
from dovetail_torch.attention.run_order import first_tokens, in_order, run_order
from dovetail_torch.lazy_memory import lazy_zeros
from dovetail_torch.positions import PositionTables
from dovetail_torch.runner.device_rows import DeviceRows
from dovetail_torch.runner.input_batch import InputBatch, StepShape
from dovetail_torch.runner.staging import Array, Staging

PrepareInputs = Callable[[StepColumns], None]
"""The type of the op provider's `PreparesInputs.prepare_inputs`."""

SamplingNumbers = Callable[[Sequence[int]], tuple[Array, ...]]
"""A function from the sampling rows to the numbers that the sampler needs from the host."""

_NUM_COLUMNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch(InputBatch):
    """The inputs of one step.

    flat_index_S: int64; flat indices of the sampled tokens in `token_ids_RL`. num_padded: number of
    requests in `attention` if the step is a padded step of decodes, otherwise 0.
    """

    flat_index_S: torch.Tensor
    num_padded: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingStep:
    """The inputs of a step that has only padding. See `DeviceBatch`."""

    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: tuple[AttentionBatch, ...]


class DeviceInputs:
    """Computes the tensors of each step.

    Tensors with one number per token or request keep their address. decode_sizes: ascending numbers
    of requests to which steps of decodes are padded; steps with more requests are not padded. Block
    tables of padded steps have the maximum width.
    """

    def __init__(
        self,
        rows: DeviceRows,
        staging: Staging,
        shape: StepShape,
        *,
        prepare_inputs: PrepareInputs,
        sampling_numbers: SamplingNumbers,
        tables: PositionTables | None = None,
    ) -> None:
        """tables: position tables of the model, filled before the steps that need them."""
        block_sizes, max_num_tokens = shape.block_sizes, shape.max_num_tokens
        self._thresholds = shape.thresholds
        self._rows = rows
        self._staging = staging
        self._block_sizes = block_sizes
        self._prepare_inputs = prepare_inputs
        self._sampling_numbers = sampling_numbers
        self._position_tables = tables or PositionTables()
        self.decode_sizes: Sequence[int] = ()
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
        """Apply the plan to the rows and return the step's tensors. None for an empty plan."""
        changes = self._rows.changes(plan)
        if plan.empty:
            if changes.arrays:
                self._rows.apply(changes, self._staging.send(changes.arrays))
            return None
        rows, starts, counts = map(np.asarray, (plan.rows, plan.starts, plan.num_tokens))
        ends = starts + counts
        is_mixed = plan.total_num_tokens > len(rows)
        order = run_order(counts, self._thresholds) if is_mixed else None
        own_rows, own_starts, own_counts, own_ends = in_order((rows, starts, counts, ends), order)
        first_R1 = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(own_counts, out=first_R1[1:])
        first_R = first_tokens(first_R1, order)
        sampling_runs = np.flatnonzero(np.asarray(plan.samples))
        sampled_rows = rows[sampling_runs]
        sampling_rows = sampled_rows.tolist()
        last = (first_R + counts)[sampling_runs] - np.int64(1)
        flat_index = sampled_rows * np.int64(self._rows.max_model_len) + ends[sampling_runs]
        numbers = self._sampling_numbers(sampling_rows)
        num_padded = self._num_padded(len(rows), len(sampling_runs), plan.total_num_tokens)
        runs = (own_rows, own_starts, first_R1)
        if num_padded > len(rows):
            runs = self._padded(*runs, num_padded - len(rows))
        sent = self._staging.send((*runs, last, flat_index, *numbers, *changes.arrays))
        end = _NUM_COLUMNS + len(numbers)
        self._rows.apply(changes, sent[end:])
        rows_R, starts_R, query_start_R1, last_S, flat_index_S = sent[:_NUM_COLUMNS]
        query_lens: Sequence[int] = plan.num_tokens if order is None else own_counts.tolist()
        seq_lens = own_ends.tolist()
        longest = max(seq_lens)
        if longest > self._position_tables.num_ready:
            self._position_tables.grow(longest)
        sent_runs = (rows_R, starts_R, query_start_R1)
        width = self._rows.max_model_len if num_padded else longest
        num_tokens = num_padded or plan.total_num_tokens
        columns = self._columns(sent_runs, num_tokens, width, int(counts.max()))
        self._prepare_inputs(columns)
        if num_padded:
            num_added = num_padded - len(rows)
            query_lens, seq_lens = [1] * num_padded, seq_lens + [1] * num_added
        return DeviceBatch(
            plan=plan,
            input_ids_T=columns.input_ids_T,
            positions_T=columns.positions_T,
            attention=_attention(columns, query_lens, seq_lens),
            last_S=last_S,
            sampling_runs=sampling_runs,
            sampling_rows=sampling_rows,
            rows=rows,
            ends=ends,
            first_R=first_R,
            numbers=sent[_NUM_COLUMNS:end],
            flat_index_S=flat_index_S,
            num_padded=num_padded,
        )

    def padding_step(self, num_tokens: int, *, decodes: bool) -> PaddingStep:
        """Return inputs that are only padding, at the addresses of the steps that a graph replays.

        decodes: whether each token is a request with the maximum length, as the host sees it.
        Otherwise all tokens belong to one request.
        """
        counts = [1] * num_tokens if decodes else [num_tokens]
        num_runs, longest = len(counts), self._rows.max_model_len
        first_R1 = np.zeros(num_runs + 1, np.int32)
        np.cumsum(counts, out=first_R1[1:])
        rows = np.full(num_runs, self._rows.num_rows, np.int32)
        rows_R, starts_R, query_start_R1 = self._staging.send((rows, np.zeros_like(rows), first_R1))
        sent = (rows_R, starts_R, query_start_R1)
        columns = self._columns(sent, num_tokens, longest, max(counts))
        self._prepare_inputs(columns)
        seq_lens = [longest] * num_runs if decodes else counts
        return PaddingStep(
            input_ids_T=columns.input_ids_T,
            positions_T=columns.positions_T,
            attention=_attention(columns, counts, seq_lens),
        )

    def _num_padded(self, num_runs: int, num_sampling: int, num_tokens: int) -> int:
        """Return the number of requests of a padded decode step. 0 for a step without padding."""
        sizes = self.decode_sizes
        if num_sampling != num_tokens or not sizes or num_runs > sizes[-1]:
            return 0
        return sizes[bisect_left(sizes, num_runs)]

    def _padded(
        self, rows: Array, starts: Array, first_R1: Array, num_added: int
    ) -> tuple[Array, Array, Array]:
        """Return the columns of the requests, plus `num_added` requests on the padding row."""
        return (
            np.append(rows, np.full(num_added, self._rows.num_rows, rows.dtype)),
            np.append(starts, np.zeros(num_added, starts.dtype)),
            np.append(first_R1, first_R1[-1] + np.arange(1, num_added + 1, dtype=first_R1.dtype)),
        )

    def append(self, batch: InputBatch, token_ids_S: torch.Tensor) -> None:
        """Write the tokens sampled for `batch`, int32, to their rows."""
        assert isinstance(batch, DeviceBatch), "the batch was not created by this object"
        self._rows.token_ids_RL.view(-1).index_copy_(0, batch.flat_index_S, token_ids_S)

    def _columns(
        self,
        sent: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        num_tokens: int,
        longest_row: int,
        longest_run: int,
    ) -> StepColumns:
        """Return the columns for the device.

        sent: rows, first positions and starts of the requests.
        """
        rows, num_runs = self._rows, len(sent[0])
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
    columns: StepColumns, query_lens: Sequence[int], seq_lens: list[int]
) -> tuple[AttentionBatch, ...]:
    return tuple(
        AttentionBatch(
            query_start_R1=columns.query_start_R1,
            seq_lens_R=columns.seq_lens_R,
            block_table_RM=block_table_RM,
            slot_mapping_T=slots_T,
            query_lens=query_lens,
            seq_lens=seq_lens,
        )
        for slots_T, block_table_RM in zip(columns.slots_T, columns.block_tables_RM, strict=True)
    )

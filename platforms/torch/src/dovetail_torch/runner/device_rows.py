"""The runner's state of each row on an asynchronous device.

Tokens and block tables are stored on the device. A plan changes them by packed indices and values;
the host stores only counts. This module does not depend on staging or steps.
Dimensions: R rows, L maximum tokens of a row, M maximum blocks of a row, J new requests, N numbers
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dovetail.plan import BlockColumns, NewRequest, SchedulerOutput
from dovetail_torch.lazy_memory import lazy_zeros

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class RowChanges:
    """The changes of a plan to the rows.

    targets: one-dimensional tensors on the device. arrays: for each target the indices, int64
    [N], and the values, int32 [N], on the host; if there are new requests, their rows are
    the first array, int64 [J].
    """

    has_joins: bool
    targets: Sequence[torch.Tensor]
    arrays: Sequence[Array]


class DeviceRows:
    """The state of all rows. Only the runner changes it, by `changes` and then `apply`.

    token_ids_RL: int32. block_tables: one int32 [R, M] per KV-cache group. Both are on the device.
    num_prompt_tokens, num_prompt_logprobs: int32 [R], on the host; num_prompt_logprobs is -1 if
    none are requested. After the last row there is a row for padding, with tokens and blocks of 0.
    """

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_sizes: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.num_rows = num_rows
        self.max_model_len = max_model_len
        self.token_ids_RL = lazy_zeros((num_rows + 1, max_model_len), torch.int32, device)
        self.block_tables = tuple(
            lazy_zeros((num_rows + 1, -(-max_model_len // size)), torch.int32, device)
            for size in block_sizes
        )
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.num_prompt_logprobs = np.full(num_rows, -1, np.int32)
        self._num_blocks = [np.zeros(num_rows, np.int64) for _ in block_sizes]
        self._generations = np.zeros(num_rows, np.int64)

    def changes(self, plan: SchedulerOutput) -> RowChanges:
        """Return the plan's changes, and update the counts.

        Rows are not cleared when requests leave.
        """
        targets: list[torch.Tensor] = []
        arrays: list[Array] = []
        if plan.joins:
            for request in plan.joins:
                self._join(request)
            targets.append(self.token_ids_RL.view(-1))
            arrays += self._joined(plan.joins)
        for group, columns in enumerate(plan.blocks):
            if columns.rows:
                targets.append(self.block_tables[group].view(-1))
                arrays += self._grown(group, columns)
        return RowChanges(has_joins=bool(plan.joins), targets=targets, arrays=arrays)

    def apply(self, changes: RowChanges, columns: Sequence[torch.Tensor]) -> None:
        """Write `changes` to the rows. columns: the arrays of `changes`, copied to the device."""
        if changes.has_joins:
            joined_J, *columns = columns
            for table in self.block_tables:  # entries beyond a row's blocks must be 0
                table.index_fill_(0, joined_J, 0)
        for target, index_N, numbers_N in zip(
            changes.targets, columns[::2], columns[1::2], strict=True
        ):
            target.index_copy_(0, index_N, numbers_N)

    def _join(self, request: NewRequest) -> None:
        row = request.row
        assert request.generation > self._generations[row], "the generation of a row must increase"
        self._generations[row] = request.generation
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        num_prompt_logprobs = request.sampling_params.prompt_logprobs
        self.num_prompt_logprobs[row] = -1 if num_prompt_logprobs is None else num_prompt_logprobs
        for num_blocks in self._num_blocks:
            num_blocks[row] = 0

    def _joined(self, joins: Sequence[NewRequest]) -> list[Array]:
        """Return the rows of the new requests, the indices of their tokens, and the tokens."""
        rows_J = np.array([request.row for request in joins], np.int64)
        ids = [np.asarray(request.token_ids) for request in joins]
        index_N = _ranges(rows_J * self.max_model_len, np.array([len(own) for own in ids]))
        return [rows_J, index_N, np.concatenate(ids)]

    def _grown(self, group: int, columns: BlockColumns) -> list[Array]:
        """Return the indices of the new blocks in the group's table, and the blocks."""
        num_blocks, width = self._num_blocks[group], self.block_tables[group].shape[1]
        firsts = []
        for row, count in zip(columns.rows, columns.counts, strict=True):  # a row may occur twice
            firsts.append(row * width + int(num_blocks[row]))
            num_blocks[row] += count
        index_N = _ranges(np.array(firsts, np.int64), np.asarray(columns.counts))
        return [index_N, np.asarray(columns.block_ids)]


def _ranges(firsts: Array, counts: Array) -> Array:
    """Return the ranges first, first + 1, … of `count` numbers each, concatenated, int64."""
    ends = np.cumsum(counts)
    index_N: Array = np.repeat(firsts - (ends - counts), counts) + np.arange(ends[-1])
    return index_N

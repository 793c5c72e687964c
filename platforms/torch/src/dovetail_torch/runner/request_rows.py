"""The runner's state of each row (batch slot): its tokens and its block tables.

Tokens are on the device, so that a sampled token is the next step's input without a copy;
block tables are on the host, where the scheduler's columns arrive.
Dimensions: R rows, L maximum tokens of a row, M maximum blocks of a row.
"""

from __future__ import annotations

import numpy as np
import torch

from dovetail.plan import BlockColumns, NewRequest, SchedulerOutput
from dovetail_torch.lazy_memory import lazy_zeros
from dovetail_torch.runner.device_columns import DeviceTokens


class RequestRows:
    """State of all rows. Only the runner changes it, by `apply` and `append`.

    token_ids_RL: int32, on the device; tokens: the same memory, in one dimension.
    block_tables: one int32 [R, M] array per KV-cache group.
    num_prompt_tokens, num_prompt_logprobs: int32 [R]; num_prompt_logprobs is -1 if none are
    requested.
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
        self.token_ids_RL = lazy_zeros((num_rows, max_model_len), torch.int32, device)
        self.tokens = DeviceTokens(self.token_ids_RL.view(-1))
        self.block_tables = [
            np.zeros((num_rows, -(-max_model_len // size)), np.int32) for size in block_sizes
        ]
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.num_prompt_logprobs = np.full(num_rows, -1, np.int32)
        self._num_blocks = [np.zeros(num_rows, np.int32) for _ in block_sizes]
        self._generations = np.zeros(num_rows, np.int64)

    def apply(self, plan: SchedulerOutput) -> None:
        """Add new requests and new blocks. Rows are not cleared when requests end."""
        for request in plan.joins:
            self._join(request)
        for group, columns in enumerate(plan.blocks):
            if columns.rows:
                self._grow(group, columns)

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids_S: torch.Tensor) -> None:
        """Store sampled tokens: token i at positions[i] of rows[i]."""
        self.tokens.write(rows * self.max_model_len + positions, token_ids_S)

    def _join(self, request: NewRequest) -> None:
        row = request.row
        assert request.generation > self._generations[row], "the generation of a row must increase"
        self._generations[row] = request.generation
        tokens = torch.from_numpy(np.asarray(request.token_ids))
        self.token_ids_RL[row, : len(tokens)] = tokens.to(self.token_ids_RL.device)
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        num_prompt_logprobs = request.sampling_params.prompt_logprobs
        self.num_prompt_logprobs[row] = -1 if num_prompt_logprobs is None else num_prompt_logprobs
        for table, num_blocks in zip(self.block_tables, self._num_blocks, strict=True):
            # Backends require that entries beyond a row's blocks are 0.
            table[row, : num_blocks[row]] = 0
            num_blocks[row] = 0

    def _grow(self, group: int, columns: BlockColumns) -> None:
        table, num_blocks = self.block_tables[group], self._num_blocks[group]
        ids = np.asarray(columns.block_ids)
        end = 0
        for row, count in zip(columns.rows, columns.counts, strict=True):
            start, end = end, end + count
            first = num_blocks[row]
            table[row, first : first + count] = ids[start:end]
            num_blocks[row] = first + count

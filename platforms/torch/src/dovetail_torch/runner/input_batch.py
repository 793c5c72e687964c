"""From a plan and the rows to the tensors of one step.

Index work is done on the host in whole columns, never request by request, and moved once.
Legend: T tokens of the step, R runs, S runs that sample, M blocks of the longest run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dovetail.interfaces import AttentionBatch
from dovetail.plan import SchedulerOutput
from dovetail_torch.runner.request_rows import RequestRows

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One step, gathered.

    input_ids_T, positions_T: int64, on the device. attention: one entry a KV-cache group.
    last_S: int64, on the device; where each sampling run's last token stands among the T.
    sampling_runs: int64 [S]; their places in the plan. rows, ends: int64 [R]; each run's row, and
    the position after its last token. first_R1: int64 [R + 1]; each run's first token.
    """

    plan: SchedulerOutput
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    last_S: torch.Tensor
    sampling_runs: Array
    rows: Array
    ends: Array
    first_R1: Array


def gather(plan: SchedulerOutput, rows: RequestRows, block_sizes: tuple[int, ...]) -> InputBatch:
    """Return the tensors of `plan`, which has been applied to `rows` and has at least one run."""
    device = rows.token_ids_RL.device
    runs = np.asarray(plan.rows).astype(np.int64)
    starts = np.asarray(plan.starts).astype(np.int64)
    counts = np.asarray(plan.num_tokens).astype(np.int64)
    ends = starts + counts
    first_R1 = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    if plan.total_num_tokens == len(runs):
        token_rows, positions = runs, starts
    else:
        token_rows = np.repeat(runs, counts)
        positions = np.arange(plan.total_num_tokens) + np.repeat(starts - first_R1[:-1], counts)
    flat = torch.from_numpy(token_rows * rows.max_model_len + positions).to(device)
    sampling_runs = np.flatnonzero(np.asarray(plan.samples))
    query_start_R1 = torch.from_numpy(first_R1.astype(np.int32)).to(device)
    seq_lens_R = torch.from_numpy(ends.astype(np.int32)).to(device)
    attention = []
    for table, size in zip(rows.block_tables, block_sizes, strict=True):
        slots = table[token_rows, positions // size].astype(np.int64) * size + positions % size
        width = -(-int(ends.max()) // size)
        batch = AttentionBatch(
            query_start_R1=query_start_R1,
            seq_lens_R=seq_lens_R,
            block_table_RM=torch.from_numpy(table[runs, :width]).to(device),
            slot_mapping_T=torch.from_numpy(slots).to(device),
            query_lens=plan.num_tokens,
            seq_lens=ends.tolist(),
        )
        attention.append(batch)
    return InputBatch(
        plan=plan,
        input_ids_T=rows.token_ids_RL.view(-1)[flat].to(torch.int64),
        positions_T=torch.from_numpy(positions).to(device),
        attention=tuple(attention),
        last_S=torch.from_numpy(first_R1[sampling_runs + 1] - 1).to(device),
        sampling_runs=sampling_runs,
        rows=runs,
        ends=ends,
        first_R1=first_R1,
    )

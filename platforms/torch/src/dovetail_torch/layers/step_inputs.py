"""`Ops.prepare_inputs` in torch: computes the inputs of a step on the device from its state.

The host knows every shape, so that no operation waits for the device. It is the reference for fused
kernels. This module does not depend on schedulers or requests.
Dimensions: T tokens of the step, R scheduled requests, L maximum tokens and M maximum blocks of a
request.
"""

from __future__ import annotations

import torch

from dovetail.interfaces.ops import StepColumns


def prepare_inputs(columns: StepColumns) -> None:
    """Fill the output fields of `columns`. The other fields are only read."""
    rows_T, positions_T = _spread(columns)
    max_model_len = columns.token_ids_RL.shape[1]
    places_T = rows_T * max_model_len + positions_T
    columns.input_ids_T.copy_(columns.token_ids_RL.view(-1).index_select(0, places_T))
    groups = zip(
        columns.block_tables,
        columns.block_sizes,
        columns.slots_T,
        columns.block_tables_RM,
        strict=True,
    )
    for table, size, slots_T, block_table_RM in groups:
        columns_T = positions_T // size
        blocks_T = table.view(-1).index_select(0, rows_T * table.shape[1] + columns_T)
        torch.add(blocks_T.to(torch.int64) * size, positions_T - columns_T * size, out=slots_T)
        width = block_table_RM.shape[1]
        torch.index_select(table[:, :width], 0, columns.rows_R, out=block_table_RM)


def _spread(columns: StepColumns) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's row and position, int64 [T]. Write positions and sequence lengths."""
    rows_R, starts_R = columns.rows_R, columns.starts_R
    firsts_R, ends_R = columns.query_start_R1[:-1], columns.query_start_R1[1:]
    torch.add(starts_R, ends_R - firsts_R, out=columns.seq_lens_R)
    if columns.longest == 1:  # each run has one token, as in a step of decodes
        return rows_R.to(torch.int64), columns.positions_T.copy_(starts_R)
    tokens_T = torch.arange(columns.num_tokens, dtype=torch.int32, device=rows_R.device)
    runs_T = torch.searchsorted(ends_R, tokens_T, right=True)
    shift_T = (starts_R - firsts_R).index_select(0, runs_T)
    positions_T = torch.add(tokens_T, shift_T, out=columns.positions_T)
    return rows_R.index_select(0, runs_T).to(torch.int64), positions_T

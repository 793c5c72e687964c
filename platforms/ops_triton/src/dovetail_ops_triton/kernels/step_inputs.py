# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Inputs of a step, computed on the device: ids, positions, lengths, slots and block tables.

Each scheduled request has separate programs, so the host needs to know only the longest one. Index
pointers have any alignment, and counts change from step to step; neither causes a compilation.
Dimensions: R requests, T tokens, M blocks of a table's row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail.interfaces.ops import StepColumns

BLOCK = 512


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "starts_ptr", "query_start_ptr"])
def tokens_kernel(
    rows_ptr,
    starts_ptr,
    query_start_ptr,
    token_ids_ptr,
    input_ids_ptr,
    positions_ptr,
    seq_lens_ptr,
    row_stride,
    BLOCK: tl.constexpr,
):
    """Write ids and positions of BLOCK tokens of a request, and its length."""
    run = tl.program_id(0)
    row = tl.load(rows_ptr + run).to(tl.int64)
    start = tl.load(starts_ptr + run)
    first = tl.load(query_start_ptr + run)
    count = tl.load(query_start_ptr + run + 1) - first
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    ids = tl.load(token_ids_ptr + row * row_stride + start + offsets, mask=mask, other=0)
    tl.store(input_ids_ptr + first + offsets, ids.to(tl.int64), mask=mask)
    tl.store(positions_ptr + first + offsets, (start + offsets).to(tl.int64), mask=mask)
    if tl.program_id(1) == 0:
        tl.store(seq_lens_ptr + run, start + count)


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["rows_ptr", "starts_ptr", "query_start_ptr"],
)
def blocks_kernel(
    rows_ptr,
    starts_ptr,
    query_start_ptr,
    table_ptr,
    slots_ptr,
    out_ptr,
    table_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the slots of BLOCK tokens of a request, and BLOCK columns of its block table.

    width: columns of the output table, whose rows are contiguous.
    """
    run = tl.program_id(0)
    row_ptr = table_ptr + tl.load(rows_ptr + run).to(tl.int64) * table_stride
    start = tl.load(starts_ptr + run)
    first = tl.load(query_start_ptr + run)
    count = tl.load(query_start_ptr + run + 1) - first
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    positions = start + offsets
    mask = offsets < count
    block = tl.load(row_ptr + positions // BLOCK_SIZE, mask=mask, other=0).to(tl.int64)
    slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
    tl.store(slots_ptr + first + offsets, slots, mask=mask)
    mask = offsets < width
    table = tl.load(row_ptr + offsets, mask=mask, other=0)
    tl.store(out_ptr + run.to(tl.int64) * width + offsets, table, mask=mask)


def prepare_inputs(columns: StepColumns) -> None:
    """Fill the output fields of `columns`: one launch, and one for each KV-cache group."""
    run_columns = (columns.rows_R, columns.starts_R, columns.query_start_R1)
    num_runs = columns.rows_R.shape[0]
    if not num_runs:
        return
    num_blocks = -(-columns.longest // BLOCK)
    tokens_kernel[(num_runs, num_blocks)](
        *run_columns,
        columns.token_ids_RL,
        columns.input_ids_T,
        columns.positions_T,
        columns.seq_lens_R,
        columns.token_ids_RL.stride(0),
        BLOCK=BLOCK,
    )
    groups = zip(
        columns.block_tables,
        columns.block_sizes,
        columns.slots_T,
        columns.block_tables_RM,
        strict=True,
    )
    for table, block_size, slots_T, table_RM in groups:
        width = table_RM.shape[1]
        blocks_kernel[(num_runs, max(num_blocks, -(-width // BLOCK)))](
            *run_columns,
            table,
            slots_T,
            table_RM,
            table.stride(0),
            width,
            BLOCK_SIZE=block_size,
            BLOCK=BLOCK,
        )

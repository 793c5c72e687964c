# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Looks up the rows of an embedding table by token id.

Dimensions: T tokens, V rows of the table, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.row_layout import row_layout

BLOCK = 1024


@triton.jit
def embedding_kernel(
    ids_ptr, table_ptr, y_ptr, table_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Copy BLOCK features of one token's row. Y is contiguous."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    row = tl.load(ids_ptr + token)
    x = tl.load(table_ptr + row * table_stride + columns, mask=mask)
    tl.store(y_ptr + token * SIZE + columns, x, mask=mask)


def look_up(ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
    """Return the table's rows for the ids, a new contiguous tensor. Ids are int64 and below V."""
    table, size = row_layout(table_VD), table_VD.shape[1]
    ids_T = ids_T.contiguous()
    y_TD = torch.empty((ids_T.shape[0], size), dtype=table_VD.dtype, device=table_VD.device)
    if y_TD.numel():
        embedding_kernel[(ids_T.shape[0], -(-size // BLOCK))](
            ids_T, table.tensor, y_TD, table.outer_stride, SIZE=size, BLOCK=BLOCK
        )
    return y_TD

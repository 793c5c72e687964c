# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Argmax of each row. A few rows are split into parts, so that the whole device is used.

Results and parts share an allocation, so the alignment of their addresses varies. The number of
parts depends on the number of rows. Neither causes a compilation.
Dimensions: R rows, V vocabulary, S parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.order import LOWEST, MINIMUM, column_of, image_of, sort_key_of
from dovetail_ops_triton.kernels.row_layout import RowLayout, row_layout

TILE = 4096
"""Number of columns that a program processes together."""
MAX_PARTS = 64
_NUM_PROGRAMS = 512
"""Number of programs that keep a large device busy."""
NUM_WARPS = 8


@triton.jit(
    do_not_specialize=["num_tiles"], do_not_specialize_on_alignment=["ids_ptr", "parts_ptr"]
)
def best_columns_kernel(
    logits_ptr,
    ids_ptr,
    parts_ptr,
    row_stride,
    vocab_size,
    num_tiles,
    TILE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Find the most likely token of `num_tiles` tiles of a row. Store its id or sort key."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * num_tiles * TILE
    sort_key = best_sort_key(logits_ptr + row * row_stride, first, num_tiles, vocab_size, TILE)
    store_sort_key(sort_key, row, ids_ptr, parts_ptr, IS_WHOLE)


@triton.jit
def best_sort_key(row_ptr, first, num_tiles, vocab_size, TILE: tl.constexpr):
    """Return the sort key of the maximum of a row, searched from column `first` on."""
    lanes = tl.arange(0, TILE)
    best = tl.full([TILE], MINIMUM, tl.int32)
    best_columns = tl.zeros([TILE], tl.int32)
    for tile in range(0, num_tiles):
        columns = first + tile * TILE + lanes
        inside = columns < vocab_size
        x = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        image = tl.where(inside, image_of(x), MINIMUM)
        # Each lane processes columns in ascending order, so it keeps the first of equal numbers.
        best_columns = tl.where(image > best, columns, best_columns)
        best = tl.maximum(best, image)
    return tl.max(sort_key_of(best, best_columns), axis=0)


@triton.jit
def store_sort_key(sort_key, row, ids_ptr, parts_ptr, IS_WHOLE: tl.constexpr):
    """Store the sort key of a part's most likely token. For a whole row, the token's id."""
    if IS_WHOLE:
        tl.store(ids_ptr + row, column_of(sort_key))
    else:
        tl.store(parts_ptr + row * tl.num_programs(1) + tl.program_id(1), sort_key)


@triton.jit(
    do_not_specialize=["num_parts"], do_not_specialize_on_alignment=["ids_ptr", "parts_ptr"]
)
def join_parts_kernel(parts_ptr, ids_ptr, num_parts, PARTS: tl.constexpr):
    """Store the id of a row's most likely token: the best result among its parts.

    PARTS: maximum number of parts.
    """
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    sort_keys = tl.load(parts_ptr + row * num_parts + parts, mask=parts < num_parts, other=LOWEST)
    tl.store(ids_ptr + row, column_of(tl.max(sort_keys, axis=0)))


def find_best(logits_RV: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, int64 [R]. The first column if several are equal.

    Supports float dtypes up to float32. A NaN counts as the maximum.
    """
    num_rows, vocab_size = logits_RV.shape
    num_parts, num_tiles = share_out(num_rows, vocab_size)
    output = torch.empty((1 + num_parts) * num_rows, dtype=torch.int64, device=logits_RV.device)
    ids_R, parts_RS = output[:num_rows], output[num_rows:]
    if not num_rows:
        return ids_R
    rows: RowLayout = row_layout(logits_RV)
    best_columns_kernel[(num_rows, num_parts)](
        rows.tensor,
        ids_R,
        parts_RS,
        rows.outer_stride,
        vocab_size,
        num_tiles,
        TILE=TILE,
        IS_WHOLE=num_parts == 1,
        num_warps=NUM_WARPS,
    )
    if num_parts > 1:
        join_parts_kernel[(num_rows,)](parts_RS, ids_R, num_parts, PARTS=MAX_PARTS, num_warps=1)
    return ids_R


def share_out(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """Return the number of parts per row and of tiles per part. Results do not depend on them."""
    num_tiles = -(-vocab_size // TILE)
    requested = min(MAX_PARTS, num_tiles, max(1, _NUM_PROGRAMS // max(1, num_rows)))
    tiles_of_part = -(-num_tiles // requested)
    return -(-num_tiles // tiles_of_part), tiles_of_part

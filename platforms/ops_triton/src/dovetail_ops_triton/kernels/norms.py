# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Root mean square norms of rows, with and without a residual, and with an offset of 1 on weights.

A row is read once and stays in registers. Its sum is computed in an order that does not depend on
other rows. Source: Zhang and Sennrich 2019, arXiv:1910.07467.
Dimensions: T rows, D features.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.row_layout import row_layout

_TILE = 2048
"""Minimum number of elements per program; short rows are grouped to reach it."""


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    num_inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Normalize ROWS rows of SIZE features. BLOCK is the next power of two. y is contiguous.

    OFFSET: added to the weights.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = rows // num_inner * outer_stride + rows % num_inner * inner_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    y = x * scale[:, None] * (weight + OFFSET)[None, :]
    tl.store(y_ptr + rows[:, None] * SIZE + columns[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Add x to the residual, in place, and normalize the sum. OFFSET: added to the weights."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    x_ptrs = x_ptr + rows[:, None] * x_stride + columns[None, :]
    residual_ptrs = residual_ptr + rows[:, None] * residual_stride + columns[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    # The sum is rounded first, so that the normalized value equals the stored residual.
    total = (x + residual).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, total, mask=mask)
    x = total.to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)
    y = x * scale[:, None] * (weight + OFFSET)[None, :]
    tl.store(y_ptr + rows[:, None] * SIZE + columns[None, :], y, mask=mask)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, *, offset: float = 0.0
) -> torch.Tensor:
    """Return the normalized rows, a new contiguous tensor. x may have any leading dimensions.

    offset: added to the weights.
    """
    return normalize(rms_norm_kernel, x_TD, (weight_D,), eps, OFFSET=offset)


def add_rms_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    *,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized sum x + residual, contiguous, and the sum, stored in `residual_TD`.

    If the residual's rows are not contiguous, the sum is stored in a copy. offset: added to the
    weights.
    """
    return add_and_normalize(
        add_rms_norm_kernel, x_TD, residual_TD, (weight_D,), eps, OFFSET=offset
    )


def normalize(
    kernel: Any,
    x_TD: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    eps: float,
    **constants: float,
) -> torch.Tensor:
    """Launch a norm of rows, and return its results. weights: the kernel's weights and biases."""
    rows, size = row_layout(x_TD), x_TD.shape[-1]
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    block, num_together, num_warps = tile_of(size)
    if y_TD.numel():
        kernel[(-(-rows.num_rows // num_together),)](
            rows.tensor,
            *weights,
            y_TD,
            rows.num_rows,
            rows.num_inner,
            rows.outer_stride,
            rows.inner_stride,
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=num_together,
            **constants,
            num_warps=num_warps,
        )
    return y_TD


def add_and_normalize(
    kernel: Any,
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weights: tuple[torch.Tensor | None, ...],
    eps: float,
    **constants: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a norm of sums of rows, and return its results and the sums."""
    size = x_TD.shape[-1]
    x = row_layout(x_TD.reshape(-1, size))
    residual = row_layout(residual_TD.reshape(-1, size))
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    block, num_together, num_warps = tile_of(size)
    if y_TD.numel():
        kernel[(-(-x.num_rows // num_together),)](
            x.tensor,
            residual.tensor,
            *weights,
            y_TD,
            x.num_rows,
            x.outer_stride,
            residual.outer_stride,
            eps,
            SIZE=size,
            BLOCK=block,
            ROWS=num_together,
            **constants,
            num_warps=num_warps,
        )
    return y_TD, residual.tensor.view(residual_TD.shape)


@cache
def tile_of(size: int) -> tuple[int, int, int]:
    """Return block size, rows per program and number of warps for rows of `size` features."""
    block = triton.next_power_of_2(size)
    num_together = max(1, _TILE // block)
    return block, num_together, min(16, max(4, block * num_together // 512))

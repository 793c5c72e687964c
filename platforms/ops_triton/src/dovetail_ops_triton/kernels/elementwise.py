# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Multiplies silu of the first half of each row by the second half; scales and soft caps.

Dimensions: T rows, D features of a half; of logits: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.functions import sigmoid
from dovetail_ops_triton.kernels.row_layout import row_layout

BLOCK = 1024


@triton.jit
def silu_and_mul_kernel(
    x_ptr,
    y_ptr,
    num_inner,
    outer_stride,
    inner_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK features of one row. Y is contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    x_ptrs = x_ptr + row // num_inner * outer_stride + row % num_inner * inner_stride + columns
    gate = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptrs + SIZE, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * SIZE + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)


@triton.jit
def scale_kernel(
    x_ptr,
    y_ptr,
    num_inner,
    outer_stride,
    inner_stride,
    factor,
    size,
    IS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK features of one row: x · factor, or factor · tanh(x / factor) if IS_CAP.

    y is contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    x_ptrs = x_ptr + row // num_inner * outer_stride + row % num_inner * inner_stride + columns
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    y = (2.0 * sigmoid(2.0 * (x / factor)) - 1.0) * factor if IS_CAP else x * factor
    tl.store(y_ptr + row * size + columns, y, mask=mask)


def silu_and_mul(x_T2D: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) · second half, a new contiguous tensor. Any leading dimensions."""
    rows, size = row_layout(x_T2D), x_T2D.shape[-1] // 2
    y_TD = torch.empty((*x_T2D.shape[:-1], size), dtype=x_T2D.dtype, device=x_T2D.device)
    if y_TD.numel():
        silu_and_mul_kernel[(rows.num_rows, -(-size // BLOCK))](
            rows.tensor,
            y_TD,
            rows.num_inner,
            rows.outer_stride,
            rows.inner_stride,
            SIZE=size,
            BLOCK=BLOCK,
        )
    return y_TD


def scale(x_TD: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x · factor, a new contiguous tensor. Any leading dimensions."""
    return _scale(x_TD, factor, is_cap=False)


def soft_cap(logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap · tanh(logits / cap), a new contiguous tensor. Any leading dimensions."""
    return _scale(logits_RV, cap, is_cap=True)


def _scale(x_TD: torch.Tensor, factor: float, *, is_cap: bool) -> torch.Tensor:
    rows, size = row_layout(x_TD), x_TD.shape[-1]
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if y_TD.numel():
        scale_kernel[(rows.num_rows, -(-size // BLOCK))](
            rows.tensor,
            y_TD,
            rows.num_inner,
            rows.outer_stride,
            rows.inner_stride,
            float(factor),
            size,
            IS_CAP=is_cap,
            BLOCK=BLOCK,
        )
    return y_TD

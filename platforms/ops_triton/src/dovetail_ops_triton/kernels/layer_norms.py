# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Layer norms of rows, with and without a weight, a bias and a residual.

A row is read once and stays in registers; its variance is the mean of the squared differences from
its mean. Sums have an order that does not depend on other rows.
Source: Ba et al. 2016, arXiv:1607.06450. Dimensions: T rows, D features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.norms import add_and_normalize, normalize


@triton.jit
def _normalize(x, mask, columns, weight_ptr, bias_ptr, eps, SIZE: tl.constexpr):
    """Return the normalized rows of `x`, float32 [rows, columns]."""
    mean = tl.sum(x, axis=1) / SIZE
    x = tl.where(mask, x - mean[:, None], 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None]
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        y = y * weight[None, :]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        y = y + bias[None, :]
    return y


@triton.jit(do_not_specialize=["num_rows"])
def layer_norm_kernel(
    x_ptr,
    weight_ptr,  # None: weights of 1
    bias_ptr,  # None: biases of 0
    y_ptr,
    num_rows,
    num_inner,
    outer_stride,
    inner_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalize ROWS rows of SIZE features. BLOCK is the next power of two. y is contiguous."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    starts = rows // num_inner * outer_stride + rows % num_inner * inner_stride
    x = tl.load(x_ptr + starts[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    y = _normalize(x, mask, columns, weight_ptr, bias_ptr, eps, SIZE)
    tl.store(y_ptr + rows[:, None] * SIZE + columns[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,  # None: weights of 1
    bias_ptr,  # None: biases of 0
    y_ptr,
    num_rows,
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add x to the residual, in place, and normalize the sum."""
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
    y = _normalize(total.to(tl.float32), mask, columns, weight_ptr, bias_ptr, eps, SIZE)
    tl.store(y_ptr + rows[:, None] * SIZE + columns[None, :], y, mask=mask)


def layer_norm(
    x_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """Return the normalized rows, a new contiguous tensor. x may have any leading dimensions."""
    return normalize(layer_norm_kernel, x_TD, (weight_D, bias_D), eps)


def add_layer_norm(
    x_TD: torch.Tensor,
    residual_TD: torch.Tensor,
    weight_D: torch.Tensor | None,
    bias_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the normalized sum x + residual, contiguous, and the sum, stored in `residual_TD`.

    If the residual's rows are not contiguous, the sum is stored in a copy.
    """
    return add_and_normalize(add_layer_norm_kernel, x_TD, residual_TD, (weight_D, bias_D), eps)

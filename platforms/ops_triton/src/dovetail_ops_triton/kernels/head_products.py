# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""The product of each head of each token with the head's matrix.

The products of a token have an order that does not depend on other tokens.
Dimensions: T tokens, H heads, I and O input and output features of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.targets import compute_type, precision_of, stages_for

TOKENS = 64
OUTPUTS = 64
"""Tokens and output features of a program."""

INPUTS = 64
"""Features of a matrix product for elements of two bytes; half as many for float32."""

NUM_STAGES = 3


@triton.jit(do_not_specialize=["num_tokens"])
def head_linear_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    num_tokens,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_out_stride,
    weight_in_stride,
    y_token_stride,
    y_head_stride,
    IN_SIZE: tl.constexpr,
    OUT_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute some outputs of one head. Grid (token blocks, output blocks, heads)."""
    head = tl.program_id(2).to(tl.int64)
    t_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    o_O = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_T = t_T < num_tokens
    is_O = o_O < OUT_SIZE
    x_ptrs_T = x_ptr + head * x_head_stride + t_T.to(tl.int64) * x_token_stride
    weight_ptrs_O = weight_ptr + head * weight_head_stride + o_O * weight_out_stride
    total_TO = tl.zeros((TOKENS, OUTPUTS), dtype=tl.float32)
    for first in range(0, IN_SIZE, INPUTS):
        i_I = first + tl.arange(0, INPUTS)
        is_I = i_I < IN_SIZE
        x_TI = tl.load(x_ptrs_T[:, None] + i_I[None], mask=is_T[:, None] & is_I[None], other=0.0)
        weight_ptrs_IO = weight_ptrs_O[None] + i_I[:, None] * weight_in_stride
        weight_IO = tl.load(weight_ptrs_IO, mask=is_I[:, None] & is_O[None], other=0.0)
        total_TO = tl.dot(
            x_TI.to(COMPUTE), weight_IO.to(COMPUTE), total_TO, input_precision=PRECISION
        )
    y_ptrs_T = y_ptr + head * y_head_stride + t_T.to(tl.int64) * y_token_stride
    tl.store(y_ptrs_T[:, None] + o_O[None], total_TO, mask=is_T[:, None] & is_O[None])


def head_linear(x_THI: torch.Tensor, weight_HOI: torch.Tensor) -> torch.Tensor:
    """Return x · Wᵀ of each head, a new contiguous tensor [T, H, O]."""
    num_tokens, num_heads, _ = x_THI.shape
    shape = (num_tokens, num_heads, weight_HOI.shape[1])
    y_THO = torch.empty(shape, dtype=x_THI.dtype, device=x_THI.device)
    multiply_heads(x_THI, weight_HOI, y_THO)
    return y_THO


def multiply_heads(x_THI: torch.Tensor, weight_HOI: torch.Tensor, y_THO: torch.Tensor) -> None:
    """Write x · Wᵀ of each head to `y_THO`, whose features are contiguous."""
    x = row_layout(x_THI)
    num_tokens, num_heads, out_size = y_THO.shape
    if not y_THO.numel():
        return
    grid = (-(-num_tokens // TOKENS), -(-out_size // OUTPUTS), num_heads)
    head_linear_kernel[grid](
        x.tensor,
        weight_HOI,
        y_THO,
        num_tokens,
        x.outer_stride,
        x.inner_stride,
        *weight_HOI.stride(),
        y_THO.stride(0),
        y_THO.stride(1),
        **product_constants(x_THI.shape[2], out_size, x_THI.dtype, x_THI.device.type),
        num_stages=stages_for(x_THI.device.type, NUM_STAGES),
    )


@cache
def product_constants(
    in_size: int, out_size: int, dtype: torch.dtype, device_type: str
) -> dict[str, Any]:
    """Return the constants of the kernel."""
    return {
        "IN_SIZE": in_size,
        "OUT_SIZE": out_size,
        "TOKENS": TOKENS,
        "OUTPUTS": OUTPUTS,
        "INPUTS": INPUTS * 2 // dtype.itemsize,
        "COMPUTE": compute_type(dtype),
        "PRECISION": precision_of(device_type),
    }

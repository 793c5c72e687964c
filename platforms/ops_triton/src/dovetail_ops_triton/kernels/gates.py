# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Computes the gates of features, of normalized groups and of a shared expert.

Sums of a row have an order that does not depend on other rows. Sources of the operations: the
reference code of Mamba 2 (Dao and Gu 2024), of gated delta nets and of Qwen2-MoE. Dimensions: T
tokens, D features, G groups, I features of a group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.functions import gelu_tanh, sigmoid, silu
from dovetail_ops_triton.kernels.norms import tile_of
from dovetail_ops_triton.kernels.row_layout import row_layout

BLOCK = 1024
"""Features of a program of `sigmoid_and_mul` and `gelu_tanh_and_mul`."""


@triton.jit
def gate_and_mul_kernel(
    x_ptr,
    gate_ptr,
    y_ptr,
    num_inner,
    x_outer_stride,
    x_inner_stride,
    gate_outer_stride,
    gate_inner_stride,
    IS_GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK features of one row. y is contiguous. Grid (rows, feature blocks)."""
    row = tl.program_id(0).to(tl.int64)
    outer = row // num_inner
    inner = row % num_inner
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    x_ptr += outer * x_outer_stride + inner * x_inner_stride
    gate_ptr += outer * gate_outer_stride + inner * gate_inner_stride
    x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    factor = gelu_tanh(gate) if IS_GELU else sigmoid(gate)
    tl.store(y_ptr + row * SIZE + columns, x * factor, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    num_rows,
    num_groups,
    x_outer_stride,
    x_inner_stride,
    gate_outer_stride,
    gate_inner_stride,
    weight_stride,  # 0 for the same weights in all groups
    eps,
    NORM_FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Normalize and gate ROWS groups of SIZE features. y is contiguous."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)[None]
    mask = (rows < num_rows)[:, None] & (columns < SIZE)
    outer = rows // num_groups
    inner = rows % num_groups
    x_ptrs = x_ptr + (outer * x_outer_stride + inner * x_inner_stride)[:, None] + columns
    gate_ptrs = gate_ptr + (outer * gate_outer_stride + inner * gate_inner_stride)[:, None]
    x = tl.load(x_ptrs, mask=mask, other=0.0)
    gate = silu(tl.load(gate_ptrs + columns, mask=mask, other=0.0).to(tl.float32))
    if not NORM_FIRST:
        x *= gate
    weight_ptrs = weight_ptr + (inner * weight_stride)[:, None] + columns
    weight = tl.load(weight_ptrs, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)[:, None] * weight
    if NORM_FIRST:
        y *= gate
    tl.store(y_ptr + rows[:, None] * SIZE + columns, y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def shared_expert_kernel(
    y_ptr,
    shared_ptr,
    x_ptr,
    gate_ptr,  # None: no gate
    out_ptr,
    num_rows,
    y_stride,
    shared_stride,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Add the outputs of the shared expert for ROWS tokens. The result is contiguous."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < SIZE)[None]
    y_ptrs = y_ptr + rows[:, None] * y_stride + columns[None]
    shared_ptrs = shared_ptr + rows[:, None] * shared_stride + columns[None]
    y = tl.load(y_ptrs, mask=mask, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptrs, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        x_ptrs = x_ptr + rows[:, None] * x_stride + columns[None]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
        shared *= sigmoid(tl.sum(x * gate[None], axis=1))[:, None]
    tl.store(out_ptr + rows[:, None] * SIZE + columns[None], y + shared, mask=mask)


def sigmoid_and_mul(x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
    """Return x · sigmoid(gate), a new contiguous tensor. Any leading dimensions."""
    return _gate_and_mul(x_TD, gate_TD, is_gelu=False)


def gelu_tanh_and_mul(x_TD: torch.Tensor, gate_TD: torch.Tensor) -> torch.Tensor:
    """Return x · gelu(gate), by tanh, a new contiguous tensor. Any leading dimensions."""
    return _gate_and_mul(x_TD, gate_TD, is_gelu=True)


def _gate_and_mul(x_TD: torch.Tensor, gate_TD: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    x, gate, size = row_layout(x_TD), row_layout(gate_TD), x_TD.shape[-1]
    y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    if y_TD.numel():
        gate_and_mul_kernel[(x.num_rows, -(-size // BLOCK))](
            x.tensor,
            gate.tensor,
            y_TD,
            x.num_inner,
            x.outer_stride,
            x.inner_stride,
            gate.outer_stride,
            gate.inner_stride,
            IS_GELU=is_gelu,
            SIZE=size,
            BLOCK=BLOCK,
        )
    return y_TD


def gated_rms_norm(
    x_TGI: torch.Tensor,
    gate_TGI: torch.Tensor,
    weight_GI: torch.Tensor,
    eps: float,
    *,
    norm_first: bool,
) -> torch.Tensor:
    """Return the gated RMS norm of x, a new contiguous tensor [T, G, I]."""
    x, gate, size = row_layout(x_TGI), row_layout(gate_TGI), x_TGI.shape[2]
    y_TGI = torch.empty(gate_TGI.shape, dtype=gate_TGI.dtype, device=gate_TGI.device)
    weight_GI = weight_GI.contiguous()
    block, num_together, num_warps = tile_of(size)
    if y_TGI.numel():
        gated_norm_kernel[(-(-x.num_rows // num_together),)](
            x.tensor,
            gate.tensor,
            weight_GI,
            y_TGI,
            x.num_rows,
            x.num_inner,
            x.outer_stride,
            x.inner_stride,
            gate.outer_stride,
            gate.inner_stride,
            size if weight_GI.dim() == 2 else 0,
            eps,
            NORM_FIRST=norm_first,
            SIZE=size,
            BLOCK=block,
            ROWS=num_together,
            num_warps=num_warps,
        )
    return y_TGI


def add_shared_expert(
    y_TD: torch.Tensor,
    shared_TD: torch.Tensor,
    x_TD: torch.Tensor,
    gate_D: torch.Tensor | None,
) -> torch.Tensor:
    """Return y + shared, or with a gate y + sigmoid(x · gate) · shared, a new tensor [T, D]."""
    y, shared, x = (row_layout(tensor) for tensor in (y_TD, shared_TD, x_TD))
    size = y_TD.shape[1]
    out_TD = torch.empty(y_TD.shape, dtype=y_TD.dtype, device=y_TD.device)
    block, num_together, num_warps = tile_of(size)
    if out_TD.numel():
        shared_expert_kernel[(-(-y.num_rows // num_together),)](
            y.tensor,
            shared.tensor,
            x.tensor,
            gate_D,
            out_TD,
            y.num_rows,
            y.outer_stride,
            shared.outer_stride,
            x.outer_stride,
            SIZE=size,
            BLOCK=block,
            ROWS=num_together,
            num_warps=num_warps,
        )
    return out_TD

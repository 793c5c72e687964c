# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""The experts of a layer: grouped matrix products over the tokens, sorted by expert.

Five launches: each expert lists its tokens; gate and up projections with the activation; down
projection; weighted sums in the order of the selection. A tile has tokens of one expert, and each
program finds the expert of its tile, so the host needs to know only the number of tokens.
Dimensions: T tokens, N pairs of a token and one of its experts, D hidden size, E experts, K experts
per token, G gate and up features, I intermediate features.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import ExpertWeights
from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.targets import compute_type, precision_of, stages_for

SORT_BLOCK = 1024
SUM_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTile:
    """The tile of a program. rows: tokens. columns: results. features: of one matrix product."""

    rows: int
    columns: int
    features: int
    num_warps: int
    num_stages: int


FEW = ExpertTile(rows=16, columns=64, features=128, num_warps=4, num_stages=3)
"""For few tokens per expert: most of the memory traffic is weights."""

MANY = ExpertTile(rows=64, columns=64, features=64, num_warps=4, num_stages=3)

WIDE = ExpertTile(rows=16, columns=32, features=32, num_warps=4, num_stages=2)
"""For float32: correct, but slow."""

_FEW_TOKENS = 16
"""Tiles of few rows are used for up to this many tokens per expert on average."""


@triton.jit(do_not_specialize=["num_pairs"])
def sort_kernel(experts_ptr, order_ptr, starts_ptr, num_pairs, BLOCK: tl.constexpr):
    """List the pairs of one expert, in order, after those of lower experts. Grid (experts).

    The results are int32: order [N], starts [E + 1].
    """
    expert = tl.program_id(0)
    lower = 0
    for first in range(0, num_pairs, BLOCK):
        n_N = first + tl.arange(0, BLOCK)
        experts_N = tl.load(experts_ptr + n_N, mask=n_N < num_pairs, other=expert)
        lower += tl.sum((experts_N < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, lower)
    for first in range(0, num_pairs, BLOCK):
        n_N = first + tl.arange(0, BLOCK)
        experts_N = tl.load(experts_ptr + n_N, mask=n_N < num_pairs, other=-1)
        own_N = (experts_N == expert).to(tl.int32)
        places_N = lower + tl.cumsum(own_N, 0) - own_N
        tl.store(order_ptr + places_N, n_N, mask=own_N > 0)
        lower += tl.sum(own_N, 0)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, lower)


@triton.jit
def _tile_of(
    starts_ptr,
    tile,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Return a tile's expert, first pair and end of pairs; NUM_EXPERTS or more beyond the last."""
    e_E = tl.arange(0, EXPERT_BLOCK)
    is_E = e_E < NUM_EXPERTS
    starts_E = tl.load(starts_ptr + e_E, mask=is_E, other=0)
    counts_E = tl.load(starts_ptr + e_E + 1, mask=is_E, other=0) - starts_E
    tiles_E = (counts_E + ROWS - 1) // ROWS
    ends_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum((ends_E <= tile).to(tl.int32), 0)
    own_E = e_E == expert
    first = tl.sum(tl.where(own_E, starts_E + (tile - ends_E + tiles_E) * ROWS, 0), 0)
    end = tl.sum(tl.where(own_E, starts_E + counts_E, 0), 0)
    return expert, first, end


@triton.jit
def gate_up_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    order_ptr,
    starts_ptr,
    inner_ptr,
    x_stride,
    expert_stride,
    weight_stride,
    limit,
    alpha,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    CLAMPED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute activations of one tile, in sorted order. Grid (tiles, column blocks)."""
    expert, first, end = _tile_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, EXPERT_BLOCK, ROWS)
    if expert >= NUM_EXPERTS:
        return
    pairs_R = first + tl.arange(0, ROWS)
    is_R = pairs_R < end
    tokens_R = tl.load(order_ptr + pairs_R, mask=is_R, other=0) // TOP_K
    i_I = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_I = i_I < INNER
    x_ptrs_R = x_ptr + tokens_R.to(tl.int64) * x_stride
    weight_ptr += expert.to(tl.int64) * expert_stride
    gate_ptrs_I = weight_ptr + i_I.to(tl.int64) * weight_stride
    up_ptrs_I = gate_ptrs_I + INNER * weight_stride
    gate_RI = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up_RI = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for feature in range(0, SIZE, FEATURES):
        d_D = feature + tl.arange(0, FEATURES)
        is_D = d_D < SIZE
        is_ID = is_I[:, None] & is_D[None]
        x_RD = tl.load(x_ptrs_R[:, None] + d_D[None], mask=is_R[:, None] & is_D[None], other=0.0)
        gate_ID = tl.load(gate_ptrs_I[:, None] + d_D[None], mask=is_ID, other=0.0)
        up_ID = tl.load(up_ptrs_I[:, None] + d_D[None], mask=is_ID, other=0.0)
        x_RD = x_RD.to(COMPUTE)
        gate_DI = tl.trans(gate_ID.to(COMPUTE))
        up_DI = tl.trans(up_ID.to(COMPUTE))
        gate_RI = tl.dot(x_RD, gate_DI, gate_RI, input_precision=PRECISION)
        up_RI = tl.dot(x_RD, up_DI, up_RI, input_precision=PRECISION)
    if bias_ptr is not None:
        bias_ptrs_I = bias_ptr + expert.to(tl.int64) * (2 * INNER) + i_I
        gate_RI += tl.load(bias_ptrs_I, mask=is_I, other=0.0).to(tl.float32)[None]
        up_RI += tl.load(bias_ptrs_I + INNER, mask=is_I, other=0.0).to(tl.float32)[None]
    if CLAMPED:  # comparisons with NaN are false, so that NaN stays NaN
        gate_RI = tl.where(gate_RI > limit, limit, gate_RI)
        up_RI = tl.where(up_RI > limit, limit, tl.where(up_RI < -limit, -limit, up_RI))
        inner_RI = gate_RI / (1.0 + tl.exp(-alpha * gate_RI)) * (up_RI + 1.0)
    else:
        inner_RI = gate_RI / (1.0 + tl.exp(-gate_RI)) * up_RI
    inner_ptrs_RI = inner_ptr + pairs_R.to(tl.int64)[:, None] * INNER + i_I[None]
    tl.store(inner_ptrs_RI, inner_RI, mask=is_R[:, None] & is_I[None])


@triton.jit
def down_kernel(
    inner_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    order_ptr,
    starts_ptr,
    y_ptr,
    expert_stride,
    weight_stride,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute outputs of one tile, in the order of pairs, [N, D]. Grid (tiles, column blocks)."""
    expert, first, end = _tile_of(starts_ptr, tl.program_id(0), NUM_EXPERTS, EXPERT_BLOCK, ROWS)
    if expert >= NUM_EXPERTS:
        return
    pairs_R = first + tl.arange(0, ROWS)
    is_R = pairs_R < end
    d_D = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_D = d_D < SIZE
    inner_ptrs_R = inner_ptr + pairs_R.to(tl.int64) * INNER
    weight_ptrs_D = weight_ptr + expert.to(tl.int64) * expert_stride
    weight_ptrs_D += d_D.to(tl.int64) * weight_stride
    y_RD = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for feature in range(0, INNER, FEATURES):
        i_I = feature + tl.arange(0, FEATURES)
        is_I = i_I < INNER
        inner_RI = tl.load(
            inner_ptrs_R[:, None] + i_I[None], mask=is_R[:, None] & is_I[None], other=0.0
        )
        weight_DI = tl.load(
            weight_ptrs_D[:, None] + i_I[None], mask=is_D[:, None] & is_I[None], other=0.0
        )
        weight_ID = tl.trans(weight_DI.to(COMPUTE))
        y_RD = tl.dot(inner_RI.to(COMPUTE), weight_ID, y_RD, input_precision=PRECISION)
    if bias_ptr is not None:
        bias_ptrs_D = bias_ptr + expert.to(tl.int64) * SIZE + d_D
        y_RD += tl.load(bias_ptrs_D, mask=is_D, other=0.0).to(tl.float32)[None]
    places_R = tl.load(order_ptr + pairs_R, mask=is_R, other=0).to(tl.int64)
    y_ptrs_RD = y_ptr + places_R[:, None] * SIZE + d_D[None]
    tl.store(y_ptrs_RD, y_RD, mask=is_R[:, None] & is_D[None])


@triton.jit
def sum_kernel(
    y_ptr,
    weights_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the weighted outputs of one token's experts. Grid (tokens, feature blocks)."""
    token = tl.program_id(0).to(tl.int64)
    d_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_D = d_D < SIZE
    total_D = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        y_D = tl.load(y_ptr + pair * SIZE + d_D, mask=is_D, other=0.0).to(tl.float32)
        total_D += tl.load(weights_ptr + pair) * y_D
    tl.store(out_ptr + token * SIZE + d_D, total_D, mask=is_D)


def fused_experts(
    x_TD: torch.Tensor,
    experts_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    layer: ExpertWeights,
) -> torch.Tensor:
    """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D].

    The other allocations are one activation and one output for each pair, and two lists.
    """
    x, device = row_layout(x_TD), x_TD.device
    (num_tokens, size), top_k = x_TD.shape, experts_TK.shape[1]
    num_experts, _, inner_size = layer.down_EDI.shape
    num_pairs = num_tokens * top_k
    out_TD = torch.empty((num_tokens, size), dtype=x_TD.dtype, device=device)
    if not num_pairs or not size:
        return out_TD.zero_()
    lists = _sort(experts_TK, num_experts)
    tile = tile_for(num_pairs, num_experts, x_TD.dtype)
    constants = expert_constants(tile, num_experts, (size, inner_size)) | {
        "COMPUTE": compute_type(x_TD.dtype),
        "PRECISION": precision_of(device.type),
        "num_warps": tile.num_warps,
        "num_stages": stages_for(device.type, tile.num_stages),
    }
    num_tiles = min(num_pairs, num_pairs // tile.rows + min(num_experts, num_pairs))
    inner_NI = torch.empty((num_pairs, inner_size), dtype=x_TD.dtype, device=device)
    gate_up = row_layout(layer.gate_up_EGD)
    gate_up_kernel[(num_tiles, -(-inner_size // tile.columns))](
        x.tensor,
        gate_up.tensor,
        _contiguous(layer.gate_up_bias_EG),
        *lists,
        inner_NI,
        x.outer_stride,
        gate_up.outer_stride,
        gate_up.inner_stride,
        float(layer.limit),
        float(layer.alpha),
        TOP_K=top_k,
        CLAMPED=layer.limit > 0,
        **constants,
    )
    y_ND = torch.empty((num_pairs, size), dtype=x_TD.dtype, device=device)
    down = row_layout(layer.down_EDI)
    down_kernel[(num_tiles, -(-size // tile.columns))](
        inner_NI,
        down.tensor,
        _contiguous(layer.down_bias_ED),
        *lists,
        y_ND,
        down.outer_stride,
        down.inner_stride,
        **constants,
    )
    sum_kernel[(num_tokens, -(-size // SUM_BLOCK))](
        y_ND, weights_TK.contiguous(), out_TD, SIZE=size, TOP_K=top_k, BLOCK=SUM_BLOCK
    )
    return out_TD


def _sort(experts_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs in the order of their experts, [N], and the first of each, [E + 1]."""
    order_N = torch.empty(experts_TK.numel(), dtype=torch.int32, device=experts_TK.device)
    starts_E1 = torch.empty(num_experts + 1, dtype=torch.int32, device=experts_TK.device)
    sort_kernel[(num_experts,)](
        experts_TK.contiguous(), order_N, starts_E1, len(order_N), BLOCK=SORT_BLOCK
    )
    return order_N, starts_E1


def tile_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTile:
    """Return the tile for this number of pairs of a token and an expert."""
    if dtype == torch.float32:
        return WIDE
    return FEW if num_pairs <= _FEW_TOKENS * num_experts else MANY


@cache
def expert_constants(tile: ExpertTile, num_experts: int, sizes: tuple[int, int]) -> dict[str, Any]:
    """Return the constants of both projections. sizes: hidden size, intermediate features."""
    return {
        "SIZE": sizes[0],
        "INNER": sizes[1],
        "NUM_EXPERTS": num_experts,
        "EXPERT_BLOCK": triton.next_power_of_2(num_experts),
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "FEATURES": tile.features,
    }


def _contiguous(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.contiguous()

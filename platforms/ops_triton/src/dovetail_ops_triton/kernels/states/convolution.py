# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Causal convolution of each channel with its last inputs, with or without SiLU. Saves its states.

Singles (requests with one token) take one launch, which also saves their states. Other requests
take two: the first computes the results of all chunks at the same time, and the second saves the
states after each part. Within a program, a barrier separates the loads of a state from the stores
to the same block. Dimensions: T tokens, C channels, W kernel size, K = W - 1 kept inputs, L tokens
of a chunk.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import StateParts
from dovetail_ops_triton.kernels.functions import silu
from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.states.singles import locate_single
from dovetail_ops_triton.kernels.states.state_plan import CHUNK_SIZE, StatePlan, plan_states

BLOCK = 256
"""Channels of a program for singles, and for saved states."""

CHUNK_BLOCK = 128
"""Channels of a program for a chunk."""


@triton.jit(do_not_specialize_on_alignment=["reads_ptr", "writes_ptr", "singles_ptr"])
def convolve_singles_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    states_ptr,
    reads_ptr,
    writes_ptr,
    singles_ptr,  # None: token and part are the index of the single
    y_ptr,
    x_stride,
    weight_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATED: tl.constexpr,
):
    """Compute BLOCK channels of one token, and save its state. Grid (singles, channel blocks)."""
    token, read, write = locate_single(singles_ptr, reads_ptr, writes_ptr)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k_K = tl.arange(0, KEPT_BLOCK)
    is_C = c_C < CHANNELS
    x_C = tl.load(x_ptr + token * x_stride + c_C, mask=is_C, other=0.0)
    weight_ptrs_C = weight_ptr + c_C * weight_stride
    total_C = x_C.to(tl.float32) * tl.load(weight_ptrs_C + WIDTH - 1, mask=is_C, other=0.0)
    if bias_ptr is not None:
        total_C += tl.load(bias_ptr + c_C, mask=is_C, other=0.0)
    if WIDTH > 1:
        mask_KC = (k_K < WIDTH - 1)[:, None] & is_C[None]
        places_KC = k_K[:, None] * CHANNELS + c_C[None]
        before_ptrs_KC = states_ptr + tl.maximum(read, 0) * block_stride + places_KC
        before_KC = tl.load(before_ptrs_KC, mask=mask_KC & (read >= 0), other=0.0)
        weight_KC = tl.load(weight_ptrs_C[None] + k_K[:, None], mask=mask_KC, other=0.0)
        total_C += tl.sum(before_KC.to(tl.float32) * weight_KC, 0)
        later_KC = (k_K < WIDTH - 2)[:, None] & is_C[None] & (read >= 0)
        after_KC = tl.load(before_ptrs_KC + CHANNELS, mask=later_KC, other=0.0)
        after_KC = tl.where((k_K == WIDTH - 2)[:, None], x_C[None], after_KC)
        tl.debug_barrier()
        tl.store(states_ptr + write * block_stride + places_KC, after_KC, mask=mask_KC)
    if ACTIVATED:
        total_C = silu(total_C)
    tl.store(y_ptr + token * CHANNELS + c_C, total_C, mask=is_C)


@triton.jit(do_not_specialize_on_alignment=["reads_ptr", "chunks_ptr"])
def convolve_chunks_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    states_ptr,
    reads_ptr,
    chunks_ptr,
    y_ptr,
    x_stride,
    weight_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATED: tl.constexpr,
):
    """Compute BLOCK channels of one chunk. Grid (chunks, channel blocks)."""
    chunk = tl.program_id(0)
    start = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
    size = tl.load(chunks_ptr + 4 * chunk + 1)
    first = tl.load(chunks_ptr + 4 * chunk + 2).to(tl.int64)
    read = tl.load(reads_ptr + tl.load(chunks_ptr + 4 * chunk + 3)).to(tl.int64)
    states_ptr += tl.maximum(read, 0) * block_stride
    l_L = tl.arange(0, LENGTH)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_C = c_C < CHANNELS
    is_LC = (l_L < size)[:, None] & is_C[None]
    total_LC = tl.zeros((LENGTH, BLOCK), dtype=tl.float32)
    for lag in tl.static_range(WIDTH):
        tokens_L = start + l_L - lag
        x_ptrs_LC = x_ptr + tokens_L[:, None] * x_stride + c_C[None]
        x_LC = tl.load(x_ptrs_LC, mask=is_LC & (tokens_L >= first)[:, None], other=0.0)
        x_LC = x_LC.to(tl.float32)
        if lag > 0:  # noqa: SIM102  # the outer condition is known at compile time
            if (start - lag < first) & (read >= 0):
                is_kept_LC = is_LC & (tokens_L < first)[:, None]
                kept_L = WIDTH - 1 + tokens_L - first
                kept_ptrs_LC = states_ptr + kept_L[:, None] * CHANNELS + c_C[None]
                x_LC += tl.load(kept_ptrs_LC, mask=is_kept_LC, other=0.0).to(tl.float32)
        weight_ptrs_C = weight_ptr + c_C * weight_stride + WIDTH - 1 - lag
        weight_C = tl.load(weight_ptrs_C, mask=is_C, other=0.0).to(tl.float32)
        total_LC += x_LC * weight_C[None]
    if bias_ptr is not None:
        total_LC += tl.load(bias_ptr + c_C, mask=is_C, other=0.0).to(tl.float32)[None]
    y_ptrs_LC = y_ptr + (start + l_L)[:, None] * CHANNELS + c_C[None]
    if ACTIVATED:
        total_LC = silu(total_LC)
    tl.store(y_ptrs_LC, total_LC, mask=is_LC)


@triton.jit(do_not_specialize_on_alignment=["reads_ptr", "writes_ptr", "runs_ptr", "ends_ptr"])
def save_inputs_kernel(
    x_ptr,
    states_ptr,
    reads_ptr,
    writes_ptr,
    runs_ptr,
    ends_ptr,
    x_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Save the last inputs of each part of one request. Grid (requests, channel blocks).

    A state contains the last inputs of a part; a short part keeps the end of the previous state.
    """
    run = tl.program_id(0)
    part = tl.load(runs_ptr + 4 * run)
    end_part = tl.load(runs_ptr + 4 * run + 1)
    start = tl.load(runs_ptr + 4 * run + 3)
    before = tl.load(reads_ptr + part).to(tl.int64)
    k_K = tl.arange(0, KEPT_BLOCK)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_C = c_C < CHANNELS
    mask_KC = (k_K < WIDTH - 1)[:, None] & is_C[None]
    places_KC = k_K[:, None] * CHANNELS + c_C[None]
    for p in range(part, end_part):
        end = tl.load(ends_ptr + p)
        tokens_K = end - (WIDTH - 1) + k_K
        is_new_KC = mask_KC & (tokens_K >= start)[:, None]
        x_ptrs_KC = x_ptr + tokens_K.to(tl.int64)[:, None] * x_stride + c_C[None]
        x_KC = tl.load(x_ptrs_KC, mask=is_new_KC, other=0.0)
        is_old_KC = mask_KC & (tokens_K < start)[:, None] & (before >= 0)
        old_ptrs_KC = states_ptr + tl.maximum(before, 0) * block_stride + places_KC
        old_KC = tl.load(old_ptrs_KC + (end - start) * CHANNELS, mask=is_old_KC, other=0.0)
        write = tl.load(writes_ptr + p).to(tl.int64)
        tl.debug_barrier()
        kept_KC = tl.where((tokens_K >= start)[:, None], x_KC, old_KC)
        tl.store(states_ptr + write * block_stride + places_KC, kept_KC, mask=mask_KC)
        tl.debug_barrier()
        before = write
        start = end


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_BWC: torch.Tensor,
    parts: StateParts,
    *,
    activated: bool = True,
) -> torch.Tensor:
    """Return silu(convolution + bias), a new contiguous tensor [T, C], and update the states.

    activated: False for convolution + bias, without the SiLU.
    """
    x, width = row_layout(x_TC), weight_CW.shape[1]
    if weight_CW.stride(1) != 1:
        weight_CW = weight_CW.contiguous()
    num_channels = x_TC.shape[1]
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    plan = plan_states(parts, x_TC.device)
    sizes = {"CHANNELS": num_channels, "WIDTH": width}
    kept = sizes | {"KEPT_BLOCK": _kept_block(width), "BLOCK": BLOCK}
    num_blocks = -(-num_channels // BLOCK)
    strides = (x.outer_stride, weight_CW.stride(0), states_BWC.stride(0))
    if plan.num_singles:
        convolve_singles_kernel[(plan.num_singles, num_blocks)](
            x.tensor,
            weight_CW,
            bias_C,
            states_BWC,
            parts.reads_N,
            parts.writes_N,
            plan.singles_S2,
            y_TC,
            *strides,
            **kept,
            ACTIVATED=activated,
        )
    if plan.num_runs:
        convolve_chunks_kernel[(plan.num_chunks, -(-num_channels // CHUNK_BLOCK))](
            x.tensor,
            weight_CW,
            bias_C,
            states_BWC,
            parts.reads_N,
            plan.chunks_C4,
            y_TC,
            *strides,
            **sizes,
            LENGTH=CHUNK_SIZE,
            BLOCK=CHUNK_BLOCK,
            ACTIVATED=activated,
        )
        if width > 1:
            _save(x.tensor, states_BWC, parts, plan, kept)
    return y_TC


def _save(
    x_TC: torch.Tensor,
    states_BWC: torch.Tensor,
    parts: StateParts,
    plan: StatePlan,
    constants: dict[str, int],
) -> None:
    """Save the states of the requests that are not singles."""
    grid = (plan.num_runs, -(-constants["CHANNELS"] // constants["BLOCK"]))
    save_inputs_kernel[grid](
        x_TC,
        states_BWC,
        parts.reads_N,
        parts.writes_N,
        plan.runs_R4,
        plan.ends_N,
        x_TC.stride(0),
        states_BWC.stride(0),
        **constants,
    )


@cache
def _kept_block(width: int) -> int:
    """Return how many inputs a kernel of this width keeps, padded to a power of two."""
    return triton.next_power_of_2(max(width - 1, 1))

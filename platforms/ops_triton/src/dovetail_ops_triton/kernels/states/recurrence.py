# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""The gated linear recurrence (RG-LRU) of each channel, whose state is one number.

Singles (requests with one token) take one launch, and other requests another one, in which a
program computes the tokens of a request in sequence. It loads LENGTH tokens at a time, because the
gates do not depend on the state. Every token is computed by the same instructions, so the results
do not depend on how a prompt is divided. Dimensions: T tokens, B blocks, C channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import GatedRecurrenceInputs, StateParts
from dovetail_ops_triton.kernels.functions import one_minus_exp, sigmoid
from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.states.singles import locate_single
from dovetail_ops_triton.kernels.states.state_plan import plan_states

BLOCK = 256
"""Channels of a program for singles."""

RUN_BLOCK = 64
"""Channels of a program for other requests: one warp with two channels for each thread."""

LENGTH = 8
"""Tokens that are loaded at the same time."""

RUN_WARPS = 1


@triton.jit
def _gate(
    x_ptr,
    input_ptr,
    decay_ptr,
    input_bias_C,
    decay_bias_C,
    rates_C,
    is_new,
    mask_C,
):
    """Return the decay of a token, and the value that is added to the state.

    is_new: whether no state precedes the token.
    """
    decay_C = tl.load(decay_ptr, mask=mask_C, other=0.0).to(tl.float32) + decay_bias_C
    exponent_C = rates_C * sigmoid(decay_C)
    decay_C = tl.exp(exponent_C)
    # 1 - a² = (1 - a)(1 + a)
    scale_C = tl.sqrt(one_minus_exp(exponent_C) * (1.0 + decay_C))
    input_C = tl.load(input_ptr, mask=mask_C, other=0.0).to(tl.float32) + input_bias_C
    value_C = sigmoid(input_C) * tl.load(x_ptr, mask=mask_C, other=0.0).to(tl.float32)
    return decay_C, tl.where(is_new, value_C, scale_C * value_C)


@triton.jit(do_not_specialize_on_alignment=["reads_ptr", "writes_ptr", "singles_ptr"])
def recur_singles_kernel(
    x_ptr,
    input_ptr,
    decay_ptr,
    input_bias_ptr,
    decay_bias_ptr,
    rates_ptr,
    states_ptr,
    reads_ptr,
    writes_ptr,
    singles_ptr,  # None: token and part are the index of the single
    y_ptr,
    x_stride,
    input_stride,
    decay_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of one token, and save its state. Grid (singles, channel blocks)."""
    token, read, write = locate_single(singles_ptr, reads_ptr, writes_ptr)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_C = c_C < CHANNELS
    decay_C, value_C = _gate(
        x_ptr + token * x_stride + c_C,
        input_ptr + token * input_stride + c_C,
        decay_ptr + token * decay_stride + c_C,
        tl.load(input_bias_ptr + c_C, mask=is_C, other=0.0),
        tl.load(decay_bias_ptr + c_C, mask=is_C, other=0.0),
        tl.load(rates_ptr + c_C, mask=is_C, other=0.0),
        read < 0,
        is_C,
    )
    before_ptrs_C = states_ptr + tl.maximum(read, 0) * block_stride + c_C
    state_C = tl.load(before_ptrs_C, mask=is_C & (read >= 0), other=0.0)
    state_C = tl.fma(decay_C, state_C, value_C)
    tl.store(states_ptr + write * block_stride + c_C, state_C, mask=is_C)
    tl.store(y_ptr + token * CHANNELS + c_C, state_C, mask=is_C)


@triton.jit(do_not_specialize_on_alignment=["reads_ptr", "writes_ptr", "runs_ptr", "ends_ptr"])
def recur_runs_kernel(
    x_ptr,
    input_ptr,
    decay_ptr,
    input_bias_ptr,
    decay_bias_ptr,
    rates_ptr,
    states_ptr,
    reads_ptr,
    writes_ptr,
    runs_ptr,
    ends_ptr,
    y_ptr,
    x_stride,
    input_stride,
    decay_stride,
    block_stride,
    CHANNELS: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute BLOCK channels of one request. Grid (requests, channel blocks)."""
    run = tl.program_id(0)
    part = tl.load(runs_ptr + 4 * run)
    end_part = tl.load(runs_ptr + 4 * run + 1)
    start = tl.load(runs_ptr + 4 * run + 3)
    read = tl.load(reads_ptr + part).to(tl.int64)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_C = c_C < CHANNELS
    input_bias_C = tl.load(input_bias_ptr + c_C, mask=is_C, other=0.0)
    decay_bias_C = tl.load(decay_bias_ptr + c_C, mask=is_C, other=0.0)
    rates_C = tl.load(rates_ptr + c_C, mask=is_C, other=0.0)
    before_ptrs_C = states_ptr + tl.maximum(read, 0) * block_stride + c_C
    state_C = tl.load(before_ptrs_C, mask=is_C & (read >= 0), other=0.0)
    begin = start
    for p in range(part, end_part):
        end = tl.load(ends_ptr + p)
        for first in range(start, end, LENGTH):
            token = tl.cast(first, tl.int64)
            x_ptrs_C = x_ptr + token * x_stride + c_C
            input_ptrs_C = input_ptr + token * input_stride + c_C
            decay_ptrs_C = decay_ptr + token * decay_stride + c_C
            decays = ()
            values = ()
            for index in tl.static_range(LENGTH):
                decay_C, value_C = _gate(
                    x_ptrs_C + index * x_stride,
                    input_ptrs_C + index * input_stride,
                    decay_ptrs_C + index * decay_stride,
                    input_bias_C,
                    decay_bias_C,
                    rates_C,
                    (read < 0) & (first + index == begin),
                    is_C & (first + index < end),
                )
                decays += (decay_C,)
                values += (value_C,)
            y_ptrs_C = y_ptr + token * CHANNELS + c_C
            for index in tl.static_range(LENGTH):
                is_token = first + index < end
                after_C = tl.fma(decays[index], state_C, values[index])
                state_C = tl.where(is_token, after_C, state_C)
                tl.store(y_ptrs_C + index * CHANNELS, state_C, mask=is_C & is_token)
        start = end
        write = tl.load(writes_ptr + p).to(tl.int64)
        tl.store(states_ptr + write * block_stride + c_C, state_C, mask=is_C)


def gated_recurrence(
    inputs: GatedRecurrenceInputs, states_BC: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the states after each token, a new contiguous tensor [T, C], and update the states."""
    rows = [
        row_layout(x_TC) for x_TC in (inputs.x_TC, inputs.input_gates_TC, inputs.decay_gates_TC)
    ]
    num_channels = inputs.x_TC.shape[1]
    y_TC = torch.empty(inputs.x_TC.shape, dtype=inputs.x_TC.dtype, device=inputs.x_TC.device)
    plan = plan_states(parts, inputs.x_TC.device)
    tensors = (
        *(row.tensor for row in rows),
        inputs.input_bias_C,
        inputs.decay_bias_C,
        inputs.rates_C,
        states_BC,
        parts.reads_N,
        parts.writes_N,
    )
    strides = (*(row.outer_stride for row in rows), states_BC.stride(0))
    if plan.num_singles:
        recur_singles_kernel[(plan.num_singles, -(-num_channels // BLOCK))](
            *tensors, plan.singles_S2, y_TC, *strides, CHANNELS=num_channels, BLOCK=BLOCK
        )
    if plan.num_runs:
        recur_runs_kernel[(plan.num_runs, -(-num_channels // RUN_BLOCK))](
            *tensors,
            plan.runs_R4,
            plan.ends_N,
            y_TC,
            *strides,
            CHANNELS=num_channels,
            LENGTH=LENGTH,
            BLOCK=RUN_BLOCK,
            num_warps=RUN_WARPS,
        )
    return y_TC

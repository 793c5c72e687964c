# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Linear attention with a decaying state, with and without the delta rule.

A single (a request with one token) reads, updates and writes its state once. Other requests are
computed in chunks, in sequence: with the sum c of the logarithms of decays up to each token of a
chunk, the state after token i is exp(c_i)·S + Σ_j exp(c_i - c_j)·k_j·u_jᵀ over j ≤ i. u is the step
size times v, or with the delta rule the solution of a triangular system. A separate launch computes
everything that depends neither on the state nor on values (`chunk_systems`). A program has a slice
of the values of a head. Sources: Dao and Gu 2024, arXiv:2405.21060; Yang et al. 2024,
arXiv:2412.06464. Dimensions: T tokens, H heads, G groups of heads, K and V features of a key and of
a value, L tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import LinearAttentionInputs, StateParts
from dovetail_ops_triton.kernels.functions import sigmoid
from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.states.chunk_systems import prepare_chunks, step_sizes
from dovetail_ops_triton.kernels.states.singles import locate_single
from dovetail_ops_triton.kernels.states.state_plan import CHUNK_SIZE, plan_states
from dovetail_ops_triton.kernels.targets import precision_of

NUM_STAGES = 1
PIECE = 16
"""Features of a key in a matrix product of prompts.

With more, or without the barriers between them, a program needs more registers than there are.
"""

MAX_VALUES = 32
"""Features of a value in a program: a warp has eight columns of each product."""

_MIN_BLOCK = 16
"""Smallest size of a matrix product."""


@triton.jit(do_not_specialize_on_alignment=["reads_ptr", "writes_ptr", "singles_ptr"])
def attend_singles_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    steps_ptr,
    step_bias_ptr,
    rates_ptr,
    beta_ptr,  # None: no delta rule
    skip_ptr,  # None: factors of 0
    states_ptr,
    reads_ptr,
    writes_ptr,
    singles_ptr,  # None: token and part are the index of the single
    out_ptr,
    q_token_stride,
    q_group_stride,
    k_token_stride,
    k_group_stride,
    v_token_stride,
    v_head_stride,
    steps_stride,
    beta_stride,
    block_stride,
    step_min,
    step_max,
    key_eps,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Compute VALUE_BLOCK results of one token and head. Grid (singles, heads, value blocks)."""
    token, read, write = locate_single(singles_ptr, reads_ptr, writes_ptr)
    head = tl.program_id(1)
    k_K = tl.arange(0, KEY_BLOCK)
    f_V = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_K = k_K < KEY_SIZE
    is_V = f_V < VALUE_SIZE
    is_KV = is_K[:, None] & is_V[None]
    places_KV = head * (KEY_SIZE * VALUE_SIZE) + k_K[:, None] * VALUE_SIZE + f_V[None]
    state_ptrs_KV = states_ptr + tl.maximum(read, 0) * block_stride + places_KV
    state_KV = tl.load(state_ptrs_KV, mask=is_KV & (read >= 0), other=0.0)
    group = head // REPEATS
    q_ptrs_K = q_ptr + token * q_token_stride + group * q_group_stride + k_K
    k_ptrs_K = k_ptr + token * k_token_stride + group * k_group_stride + k_K
    v_ptrs_V = v_ptr + token * v_token_stride + head * v_head_stride + f_V
    query_K = tl.load(q_ptrs_K, mask=is_K, other=0.0).to(tl.float32)
    key_K = tl.load(k_ptrs_K, mask=is_K, other=0.0).to(tl.float32)
    v_V = tl.load(v_ptrs_V, mask=is_V, other=0.0).to(tl.float32)
    if NORMALIZE:
        query_K *= tl.rsqrt((tl.sum(query_K * query_K, 0) + key_eps) * KEY_SIZE)
        key_K *= tl.rsqrt(tl.sum(key_K * key_K, 0) + key_eps)
    logit = tl.load(steps_ptr + token * steps_stride + head).to(tl.float32)
    step = step_sizes(logit + tl.load(step_bias_ptr + head), step_min, step_max)
    state_KV *= tl.exp(step * tl.load(rates_ptr + head))
    if beta_ptr is not None:
        known_V = tl.sum(key_K[:, None] * state_KV, 0)
        beta = tl.load(beta_ptr + token * beta_stride + head).to(tl.float32)
        u_V = sigmoid(beta) * (v_V - known_V)
    else:
        u_V = step * v_V
    state_KV += key_K[:, None] * u_V[None]
    out_V = tl.sum(query_K[:, None] * state_KV, 0)
    if skip_ptr is not None:
        out_V += tl.load(skip_ptr + head) * v_V
    out_ptrs_V = out_ptr + (token * NUM_HEADS + head) * VALUE_SIZE + f_V
    tl.store(out_ptrs_V, out_V, mask=is_V)
    tl.debug_barrier()
    tl.store(states_ptr + write * block_stride + places_KV, state_KV, mask=is_KV)


@triton.jit
def _load(ptr, l_L, token_stride, k_K, is_LK):
    """Return some features of a head's queries or keys, [L, K]."""
    return tl.load(ptr + l_L[:, None] * token_stride + k_K[None], mask=is_LK, other=0.0)


@triton.jit
def _multiply(
    state,
    q_ptr,
    k_ptr,
    l_L,
    q_token_stride,
    k_token_stride,
    is_L,
    DELTA: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    LENGTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return queries · state and, with DELTA, keys · state, [L, V]."""
    known_LV = tl.zeros((LENGTH, VALUE_BLOCK), dtype=tl.float32)
    out_LV = tl.zeros((LENGTH, VALUE_BLOCK), dtype=tl.float32)
    for piece in tl.static_range(KEY_BLOCK // PIECE):
        k_K = piece * PIECE + tl.arange(0, PIECE)
        is_LK = is_L[:, None] & (k_K < KEY_SIZE)[None]
        tl.debug_barrier()
        query_LK = _load(q_ptr, l_L, q_token_stride, k_K, is_LK).to(tl.float32)
        out_LV = tl.dot(query_LK, state[piece], out_LV, input_precision=PRECISION)
        if DELTA:
            key_LK = _load(k_ptr, l_L, k_token_stride, k_K, is_LK).to(tl.float32)
            known_LV = tl.dot(key_LK, state[piece], known_LV, input_precision=PRECISION)
    return out_LV, known_LV


@triton.jit
def _update(
    state,
    fade,
    u_LV,
    k_ptr,
    l_L,
    k_token_stride,
    is_L,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the state after a chunk, in pieces. u: additions, decayed up to the chunk's end."""
    after = ()
    for piece in tl.static_range(KEY_BLOCK // PIECE):
        k_K = piece * PIECE + tl.arange(0, PIECE)
        is_LK = is_L[:, None] & (k_K < KEY_SIZE)[None]
        tl.debug_barrier()
        key_LK = _load(k_ptr, l_L, k_token_stride, k_K, is_LK)
        key_KL = tl.trans(key_LK.to(tl.float32))
        after += (tl.dot(key_KL, u_LV, state[piece] * fade, input_precision=PRECISION),)
    return after


@triton.jit(
    do_not_specialize_on_alignment=["reads_ptr", "writes_ptr", "runs_ptr", "ends_ptr"],
)
def attend_runs_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    prepared_ptr,
    skip_ptr,  # None: factors of 0
    states_ptr,
    reads_ptr,
    writes_ptr,
    runs_ptr,
    ends_ptr,
    out_ptr,
    q_token_stride,
    q_group_stride,
    k_token_stride,
    k_group_stride,
    v_token_stride,
    v_head_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    DELTA: tl.constexpr,
    PIECE: tl.constexpr,
    LENGTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute VALUE_BLOCK results of one request and head. Grid (requests, heads, value blocks)."""
    run = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.load(runs_ptr + 4 * run)
    end_part = tl.load(runs_ptr + 4 * run + 1)
    chunk = tl.load(runs_ptr + 4 * run + 2).to(tl.int64)
    start = tl.load(runs_ptr + 4 * run + 3)
    read = tl.load(reads_ptr + part).to(tl.int64)
    l_L = tl.arange(0, LENGTH)
    v_V = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_V = v_V < VALUE_SIZE
    before_ptr = states_ptr + tl.maximum(read, 0) * block_stride + head * (KEY_SIZE * VALUE_SIZE)
    state = ()
    for piece in tl.static_range(KEY_BLOCK // PIECE):
        k_K = piece * PIECE + tl.arange(0, PIECE)
        is_KV = (k_K < KEY_SIZE)[:, None] & is_V[None]
        ptrs_KV = before_ptr + k_K[:, None] * VALUE_SIZE + v_V[None]
        state += (tl.load(ptrs_KV, mask=is_KV & (read >= 0), other=0.0),)
    q_ptr += head // REPEATS * q_group_stride
    k_ptr += head // REPEATS * k_group_stride
    v_ptr += head * v_head_stride
    rows: tl.constexpr = 4 + 2 * LENGTH if DELTA else 4 + LENGTH
    places_LL = (4 + l_L)[:, None] * LENGTH + l_L[None]
    for p in range(part, end_part):
        end = tl.load(ends_ptr + p)
        for first in range(start, end, LENGTH):
            # 32-bit numbers within a chunk: pointers of 64 bits would need too many registers.
            token = tl.cast(first, tl.int64)
            key_ptr = k_ptr + token * k_token_stride
            is_L = l_L < end - first
            is_LV = is_L[:, None] & is_V[None]
            out_LV, known_LV = _multiply(
                state, q_ptr + token * q_token_stride, key_ptr, l_L, q_token_stride,
                k_token_stride, is_L, DELTA, KEY_SIZE, KEY_BLOCK, VALUE_BLOCK, PIECE, LENGTH,
                PRECISION,
            )  # fmt: skip
            factors_ptr = prepared_ptr + (chunk * NUM_HEADS + head) * (rows * LENGTH)
            out_LV *= tl.load(factors_ptr + l_L)[:, None]
            v_ptrs_V = v_ptr + token * v_token_stride + v_V
            v_ptrs_LV = v_ptrs_V[None] + l_L[:, None] * v_token_stride
            u_LV = tl.load(v_ptrs_LV, mask=is_LV, other=0.0).to(tl.float32)
            if skip_ptr is not None:
                out_LV += tl.load(skip_ptr + head) * u_LV
            if DELTA:
                u_LV -= tl.load(factors_ptr + LENGTH + l_L)[:, None] * known_LV
                solution_LL = tl.load(factors_ptr + LENGTH * LENGTH + places_LL)
                u_LV = tl.dot(solution_LL, u_LV, input_precision=PRECISION)
            scores_LL = tl.load(factors_ptr + places_LL)
            out_LV = tl.dot(scores_LL, u_LV, out_LV, input_precision=PRECISION)
            out_ptrs_V = out_ptr + (token * NUM_HEADS + head) * VALUE_SIZE + v_V
            out_ptrs_LV = out_ptrs_V[None] + l_L[:, None] * (NUM_HEADS * VALUE_SIZE)
            tl.store(out_ptrs_LV, out_LV, mask=is_LV)
            u_LV *= tl.load(factors_ptr + 2 * LENGTH + l_L)[:, None]
            decay = tl.load(factors_ptr + 3 * LENGTH)
            state = _update(
                state, decay, u_LV, key_ptr, l_L, k_token_stride, is_L, KEY_SIZE, KEY_BLOCK, PIECE,
                PRECISION,
            )  # fmt: skip
            chunk += 1
        start = end
        write = tl.load(writes_ptr + p).to(tl.int64)
        after_ptr = states_ptr + write * block_stride + head * (KEY_SIZE * VALUE_SIZE)
        tl.debug_barrier()
        for piece in tl.static_range(KEY_BLOCK // PIECE):
            k_K = piece * PIECE + tl.arange(0, PIECE)
            is_KV = (k_K < KEY_SIZE)[:, None] & is_V[None]
            tl.store(after_ptr + k_K[:, None] * VALUE_SIZE + v_V[None], state[piece], mask=is_KV)


def linear_attention(
    inputs: LinearAttentionInputs, states_BHKV: torch.Tensor, parts: StateParts
) -> torch.Tensor:
    """Return the outputs, a new contiguous float32 tensor [T, H, V], and update the states.

    Requests with several tokens need 80 bytes for each token and head, or 144 with the delta rule.
    """
    q, k, v = (row_layout(x) for x in (inputs.q_TGK, inputs.k_TGK, inputs.v_THV))
    inputs = replace(inputs, steps_TH=row_layout(inputs.steps_TH).tensor)
    if inputs.beta_TH is not None:
        inputs = replace(inputs, beta_TH=row_layout(inputs.beta_TH).tensor)
    plan = plan_states(parts, states_BHKV.device)
    sizes = kernel_sizes(inputs.q_TGK.shape[1], *states_BHKV.shape[1:])
    norm = {"NORMALIZE": inputs.key_eps > 0}
    vectors = (q.tensor, k.tensor, v.tensor)
    strides = tuple(
        stride for layout in (q, k, v) for stride in (layout.outer_stride, layout.inner_stride)
    )
    blocks = (states_BHKV, parts.reads_N, parts.writes_N)
    out_THV = torch.empty(inputs.v_THV.shape, dtype=torch.float32, device=states_BHKV.device)
    heads = (sizes["NUM_HEADS"], -(-sizes["VALUE_SIZE"] // sizes["VALUE_BLOCK"]))
    if plan.num_singles:
        attend_singles_kernel[(plan.num_singles, *heads)](
            *vectors,
            inputs.steps_TH,
            inputs.step_bias_H,
            inputs.rates_H,
            inputs.beta_TH,
            inputs.skip_H,
            *blocks,
            plan.singles_S2,
            out_THV,
            *strides,
            inputs.steps_TH.stride(0),
            0 if inputs.beta_TH is None else inputs.beta_TH.stride(0),
            states_BHKV.stride(0),
            *inputs.step_limits,
            inputs.key_eps,
            **sizes,
            **norm,
        )
    if plan.num_runs:
        attend_runs_kernel[(plan.num_runs, *heads)](
            *vectors,
            prepare_chunks(inputs, q, k, plan, sizes | norm),
            inputs.skip_H,
            *blocks,
            plan.runs_R4,
            plan.ends_N,
            out_THV,
            *strides,
            states_BHKV.stride(0),
            **sizes,
            DELTA=inputs.beta_TH is not None,
            PIECE=PIECE,
            LENGTH=CHUNK_SIZE,
            PRECISION=precision_of(k.tensor.device.type),
            num_stages=NUM_STAGES,
        )
    return out_THV


@cache
def kernel_sizes(num_groups: int, num_heads: int, key_size: int, value_size: int) -> dict[str, int]:
    """Return the sizes of heads and of programs."""
    value_block = max(_MIN_BLOCK, min(MAX_VALUES, triton.next_power_of_2(value_size)))
    return {
        "NUM_HEADS": num_heads,
        "REPEATS": num_heads // num_groups,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "KEY_BLOCK": max(_MIN_BLOCK, triton.next_power_of_2(key_size)),
        "VALUE_BLOCK": value_block,
    }

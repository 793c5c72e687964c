# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Linear attention with a decaying state, with and without the delta rule.

A single reads, updates and writes its state once. Other requests are computed in chunks, in
sequence: with the sum c of the logarithms of decays up to each token of a chunk, the state after
token i is exp(c_i)·S + Σ_j exp(c_i - c_j)·k_j·u_jᵀ over j ≤ i. u is v, or with the delta rule the
solution of a triangular system, whose inverse a launch of its own computes for all chunks at the
same time. Exponents are never positive. A program has a slice of the values of one head.
Sources: Dao and Gu 2024, arXiv:2405.21060; Yang et al. 2024, arXiv:2412.06464.
Dimensions: T tokens, H heads, G groups of heads, K and V features of a key and of a value, L tokens
of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import LinearAttentionInputs, StateParts
from dovetail_ops_triton.kernels.chunk_systems import (
    between,
    product_constants,
    since,
    solve_chunks,
)
from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.state_plan import plan_states

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
    decay_ptr,
    beta_ptr,  # None: no delta rule
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
    block_stride,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    """Compute VALUE_BLOCK results of one token and head. Grid (singles, heads, value blocks)."""
    single = tl.program_id(0)
    head = tl.program_id(1)
    if singles_ptr is not None:
        token = tl.load(singles_ptr + 2 * single)
        part = tl.load(singles_ptr + 2 * single + 1)
    else:
        token = single
        part = single
    token = token.to(tl.int64)
    read = tl.load(reads_ptr + part).to(tl.int64)
    write = tl.load(writes_ptr + part).to(tl.int64)
    k_K = tl.arange(0, KEY_BLOCK)
    v_V = tl.program_id(2) * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    is_K = k_K < KEY_SIZE
    is_V = v_V < VALUE_SIZE
    is_KV = is_K[:, None] & is_V[None]
    places_KV = head * (KEY_SIZE * VALUE_SIZE) + k_K[:, None] * VALUE_SIZE + v_V[None]
    state_ptrs_KV = states_ptr + tl.maximum(read, 0) * block_stride + places_KV
    state_KV = tl.load(state_ptrs_KV, mask=is_KV & (read >= 0), other=0.0)
    group = head // REPEATS
    q_ptrs_K = q_ptr + token * q_token_stride + group * q_group_stride + k_K
    k_ptrs_K = k_ptr + token * k_token_stride + group * k_group_stride + k_K
    v_ptrs_V = v_ptr + token * v_token_stride + head * v_head_stride + v_V
    query_K = tl.load(q_ptrs_K, mask=is_K, other=0.0).to(tl.float32)
    key_K = tl.load(k_ptrs_K, mask=is_K, other=0.0).to(tl.float32)
    u_V = tl.load(v_ptrs_V, mask=is_V, other=0.0).to(tl.float32)
    state_KV *= tl.exp(tl.load(decay_ptr + token * NUM_HEADS + head))
    if beta_ptr is not None:
        known_V = tl.sum(key_K[:, None] * state_KV, 0)
        u_V = tl.load(beta_ptr + token * NUM_HEADS + head) * (u_V - known_V)
    state_KV += key_K[:, None] * u_V[None]
    out_V = tl.sum(query_K[:, None] * state_KV, 0)
    out_ptrs_V = out_ptr + (token * NUM_HEADS + head) * VALUE_SIZE + v_V
    tl.store(out_ptrs_V, out_V, mask=is_V)
    tl.debug_barrier()
    tl.store(states_ptr + write * block_stride + places_KV, state_KV, mask=is_KV)


@triton.jit
def _load(ptr, tokens_L, token_stride, k_K, is_LK):
    """Return some features of a head's queries or keys, [L, K]."""
    return tl.load(ptr + tokens_L[:, None] * token_stride + k_K[None], mask=is_LK, other=0.0)


@triton.jit
def _multiply(
    state,
    q_ptr,
    k_ptr,
    tokens_L,
    q_token_stride,
    k_token_stride,
    is_L,
    DELTA: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    LENGTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return queries · keys, [L, L], and keys (with DELTA) and queries · state, [L, V]."""
    scores_LL = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    known_LV = tl.zeros((LENGTH, VALUE_BLOCK), dtype=tl.float32)
    out_LV = tl.zeros((LENGTH, VALUE_BLOCK), dtype=tl.float32)
    for piece in tl.static_range(KEY_BLOCK // PIECE):
        k_K = piece * PIECE + tl.arange(0, PIECE)
        is_LK = is_L[:, None] & (k_K < KEY_SIZE)[None]
        tl.debug_barrier()
        query_LK = _load(q_ptr, tokens_L, q_token_stride, k_K, is_LK)
        key_LK = _load(k_ptr, tokens_L, k_token_stride, k_K, is_LK)
        key_KL = tl.trans(key_LK.to(COMPUTE))
        scores_LL = tl.dot(query_LK.to(COMPUTE), key_KL, scores_LL, input_precision=PRECISION)
        query_LK = query_LK.to(tl.float32)
        out_LV = tl.dot(query_LK, state[piece], out_LV, input_precision=PRECISION)
        if DELTA:
            key_LK = key_LK.to(tl.float32)
            known_LV = tl.dot(key_LK, state[piece], known_LV, input_precision=PRECISION)
    return scores_LL, known_LV, out_LV


@triton.jit
def _update(
    state,
    fade,
    u_LV,
    k_ptr,
    tokens_L,
    k_token_stride,
    is_L,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the pieces of the state after a chunk. u: includes the decays up to its end."""
    after = ()
    for piece in tl.static_range(KEY_BLOCK // PIECE):
        k_K = piece * PIECE + tl.arange(0, PIECE)
        is_LK = is_L[:, None] & (k_K < KEY_SIZE)[None]
        tl.debug_barrier()
        key_LK = _load(k_ptr, tokens_L, k_token_stride, k_K, is_LK)
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
    decay_ptr,
    solutions_ptr,  # None: no delta rule
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
    PIECE: tl.constexpr,
    LENGTH: tl.constexpr,
    COMPUTE: tl.constexpr,
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
    for p in range(part, end_part):
        end = tl.load(ends_ptr + p)
        for first in range(start, end, LENGTH):
            tokens_L = l_L.to(tl.int64) + first
            is_L = tokens_L < end
            is_LV = is_L[:, None] & is_V[None]
            v_ptrs_LV = v_ptr + tokens_L[:, None] * v_token_stride + v_V[None]
            u_LV = tl.load(v_ptrs_LV, mask=is_LV, other=0.0).to(tl.float32)
            sum_L, total = since(decay_ptr + tokens_L * NUM_HEADS + head, is_L)
            scores_LL, known_LV, out_LV = _multiply(
                state, q_ptr, k_ptr, tokens_L, q_token_stride, k_token_stride, is_L,
                solutions_ptr is not None, KEY_SIZE, KEY_BLOCK, VALUE_BLOCK, PIECE, LENGTH,
                COMPUTE, PRECISION,
            )  # fmt: skip
            since_L = tl.exp(sum_L)
            if solutions_ptr is not None:
                u_LV -= since_L[:, None] * known_LV
                solution_ptr = solutions_ptr + (chunk * NUM_HEADS + head) * (LENGTH * LENGTH)
                solution_LL = tl.load(solution_ptr + l_L[:, None] * LENGTH + l_L[None])
                u_LV = tl.dot(solution_LL, u_LV, input_precision=PRECISION)
            scores_LL *= between(sum_L, LENGTH)
            out_LV *= since_L[:, None]
            out_LV = tl.dot(scores_LL, u_LV, out_LV, input_precision=PRECISION)
            out_ptrs_LV = out_ptr + (tokens_L[:, None] * NUM_HEADS + head) * VALUE_SIZE + v_V[None]
            tl.store(out_ptrs_LV, out_LV, mask=is_LV)
            u_LV *= tl.exp(total - sum_L)[:, None]
            state = _update(
                state, tl.exp(total), u_LV, k_ptr, tokens_L, k_token_stride, is_L,
                KEY_SIZE, KEY_BLOCK, PIECE, PRECISION,
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
    """Return the outputs, a new contiguous tensor [T, H, V], and update the states.

    With the delta rule, requests with several tokens need 64 bytes for each token and head.
    """
    q, k, v = (row_layout(x) for x in (inputs.q_TGK, inputs.k_TGK, inputs.v_THV))
    decay_TH = inputs.decay_TH.contiguous()
    beta_TH = None if inputs.beta_TH is None else inputs.beta_TH.contiguous()
    plan = plan_states(parts, decay_TH.device)
    sizes = kernel_sizes(inputs.q_TGK.shape[1], *states_BHKV.shape[1:])
    tensors = (q.tensor, k.tensor, v.tensor, decay_TH)
    strides = tuple(
        stride for layout in (q, k, v) for stride in (layout.outer_stride, layout.inner_stride)
    )
    blocks = (parts.reads_N, parts.writes_N)
    out_THV = torch.empty(inputs.v_THV.shape, dtype=inputs.v_THV.dtype, device=decay_TH.device)
    heads = (sizes["NUM_HEADS"], triton.cdiv(sizes["VALUE_SIZE"], sizes["VALUE_BLOCK"]))
    if plan.num_singles:
        attend_singles_kernel[(plan.num_singles, *heads)](
            *tensors,
            beta_TH,
            states_BHKV,
            *blocks,
            plan.singles_S2,
            out_THV,
            *strides,
            states_BHKV.stride(0),
            **sizes,
        )
    if plan.num_runs:
        products = product_constants(k.tensor)
        attend_runs_kernel[(plan.num_runs, *heads)](
            *tensors,
            solve_chunks(k.tensor, decay_TH, beta_TH, plan, sizes | products),
            states_BHKV,
            *blocks,
            plan.runs_R4,
            plan.ends_N,
            out_THV,
            *strides,
            states_BHKV.stride(0),
            **sizes,
            **products,
            PIECE=min(PIECE, sizes["KEY_BLOCK"]),
            num_stages=NUM_STAGES,
        )
    return out_THV


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

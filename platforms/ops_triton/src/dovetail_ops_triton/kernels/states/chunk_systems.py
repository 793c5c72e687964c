# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Computes what all programs for the values of a head share in each chunk of linear attention.

A launch computes it for all chunks at the same time: decays, products of queries and keys, norms,
and the inverse of the delta rule's system of equations. Sources: Dao and Gu 2024,
arXiv:2405.21060; Yang et al. 2024, arXiv:2412.06464. Dimensions: T tokens, H heads, G groups of
heads, K features of a key, L tokens of a chunk.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import LinearAttentionInputs
from dovetail_ops_triton.kernels.functions import sigmoid, softplus
from dovetail_ops_triton.kernels.row_layout import RowLayout
from dovetail_ops_triton.kernels.states.state_plan import CHUNK_SIZE, StatePlan
from dovetail_ops_triton.kernels.targets import compute_type, precision_of

PIECE = 64
"""Features of a product of queries and keys, for elements of two bytes; half as many for float32.

Features beyond the size of a key are masked.
"""

NUM_STAGES = 1
"""Pipeline stages: with more, a program needs more registers than there are."""


@triton.jit
def step_sizes(logits, step_min, step_max):
    """Return the step sizes: softplus of the logits, which include the biases, within limits.

    NaN stays NaN; `tl.minimum` and `tl.maximum` would return the limit.
    """
    steps = softplus(logits)
    return tl.where(steps < step_min, step_min, tl.where(steps > step_max, step_max, steps))


@triton.jit
def between(decay_L, LENGTH: tl.constexpr):
    """Return the product of the decays after token j up to i for j ≤ i, else 0, [L, L].

    decay_L: logarithms of decays. The logarithms are added from j on. All have the same sign, so
    sums of weak decays are accurate even after strong ones. Differences of prefix sums would lose
    this accuracy.
    """
    l_L = tl.arange(0, LENGTH)
    terms_LL = tl.where(l_L[:, None] > l_L[None], decay_L[:, None], 0.0)
    return tl.where(l_L[:, None] >= l_L[None], tl.exp(tl.cumsum(terms_LL, 0)), 0.0)


@triton.jit(do_not_specialize_on_alignment=["chunks_ptr"])
def prepare_chunks_kernel(
    q_ptr,
    k_ptr,
    steps_ptr,
    step_bias_ptr,
    rates_ptr,
    beta_ptr,  # None: no delta rule
    chunks_ptr,
    prepared_ptr,
    q_token_stride,
    q_group_stride,
    k_token_stride,
    k_group_stride,
    steps_stride,
    beta_stride,
    step_min,
    step_max,
    key_eps,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LENGTH: tl.constexpr,
    PIECE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Prepare one chunk and head. Grid (chunks, heads).

    The result is float32 [chunks, heads, rows, L]. Rows 0 to 2: factors on a token's query, on its
    key for the delta rule, and on its key in the state after the chunk. Row 3: the decay of the
    chunk. The next L rows: the factor of each token's addition to the state in each output. With
    the delta rule, L more rows: the inverse of its system, with the factor beta of the right side.
    The rows of the inverse are computed one after another, which is accurate for any keys.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
    size = tl.load(chunks_ptr + 4 * chunk + 1)
    l_L = tl.arange(0, LENGTH)
    is_L = l_L < size
    q_ptrs_L = q_ptr + start * q_token_stride + head // REPEATS * q_group_stride
    k_ptrs_L = k_ptr + start * k_token_stride + head // REPEATS * k_group_stride
    q_ptrs_L += l_L * q_token_stride
    k_ptrs_L += l_L * k_token_stride
    scores_LL = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    system_LL = tl.zeros((LENGTH, LENGTH), dtype=tl.float32)
    query_L = tl.zeros((LENGTH,), dtype=tl.float32)
    key_L = tl.zeros((LENGTH,), dtype=tl.float32)
    for first in range(0, KEY_SIZE, PIECE):
        k_K = first + tl.arange(0, PIECE)
        is_LK = is_L[:, None] & (k_K < KEY_SIZE)[None]
        query_LK = tl.load(q_ptrs_L[:, None] + k_K[None], mask=is_LK, other=0.0)
        key_LK = tl.load(k_ptrs_L[:, None] + k_K[None], mask=is_LK, other=0.0)
        key_KL = tl.trans(key_LK.to(COMPUTE))
        scores_LL = tl.dot(query_LK.to(COMPUTE), key_KL, scores_LL, input_precision=PRECISION)
        if beta_ptr is not None:
            system_LL = tl.dot(key_LK.to(COMPUTE), key_KL, system_LL, input_precision=PRECISION)
        if NORMALIZE:
            query_LK = query_LK.to(tl.float32)
            key_LK = key_LK.to(tl.float32)
            query_L += tl.sum(query_LK * query_LK, 1)
            key_L += tl.sum(key_LK * key_LK, 1)
    if NORMALIZE:
        query_L = tl.rsqrt((query_L + key_eps) * KEY_SIZE)
        key_L = tl.rsqrt(key_L + key_eps)
    else:
        query_L += 1.0
        key_L += 1.0
    logits_L = tl.load(steps_ptr + (start + l_L) * steps_stride + head, mask=is_L, other=0.0)
    logits_L = logits_L.to(tl.float32) + tl.load(step_bias_ptr + head)
    step_L = step_sizes(logits_L, step_min, step_max)
    decay_L = tl.where(is_L, step_L * tl.load(rates_ptr + head), 0.0)
    between_LL = between(decay_L, LENGTH) * key_L[None]
    since_L = tl.exp(tl.cumsum(decay_L, 0))
    # The decays after each token, up to the end of the chunk.
    until_L = tl.sum(tl.where(l_L[:, None] > l_L[None], decay_L[:, None], 0.0), 0)
    until_L = key_L * tl.exp(until_L)
    rows: tl.constexpr = 4 + LENGTH if beta_ptr is None else 4 + 2 * LENGTH
    prepared_ptr += (chunk.to(tl.int64) * NUM_HEADS + head) * (rows * LENGTH)
    places_LL = (4 + l_L)[:, None] * LENGTH + l_L[None]
    scores_LL *= between_LL * query_L[:, None]
    if beta_ptr is None:
        scores_LL *= step_L[None]
        until_L *= step_L
    else:
        beta_L = tl.load(beta_ptr + (start + l_L) * beta_stride + head, mask=is_L, other=0.0)
        beta_L = tl.where(is_L, sigmoid(beta_L.to(tl.float32)), 0.0)
        system_LL *= between_LL * (key_L * beta_L)[:, None]
        inverse_LL = _invert(tl.where(l_L[:, None] > l_L[None], system_LL, 0.0), size, LENGTH)
        tl.store(prepared_ptr + LENGTH * LENGTH + places_LL, inverse_LL * beta_L[None])
    tl.store(prepared_ptr + places_LL, scores_LL)
    tl.store(prepared_ptr + l_L, since_L * query_L)
    tl.store(prepared_ptr + LENGTH + l_L, since_L * key_L)
    tl.store(prepared_ptr + 2 * LENGTH + l_L, until_L)
    tl.store(prepared_ptr + 3 * LENGTH, tl.exp(tl.sum(decay_L, 0)))


@triton.jit
def _invert(system_LL, size, LENGTH: tl.constexpr):
    """Return the inverse of the unit lower triangular matrix that `system_LL` contains."""
    l_L = tl.arange(0, LENGTH)
    inverse_LL = (l_L[:, None] == l_L[None]).to(tl.float32)
    for i in range(1, size):
        is_row_LL = (l_L == i)[:, None]
        factors_L = tl.sum(tl.where(is_row_LL, system_LL, 0.0), 0)
        row_L = tl.sum(factors_L[:, None] * inverse_LL, 0)
        inverse_LL -= tl.where(is_row_LL, row_L[None], 0.0)
    return inverse_LL


def prepare_chunks(
    inputs: LinearAttentionInputs,
    queries: RowLayout,
    keys: RowLayout,
    plan: StatePlan,
    sizes: dict[str, Any],
) -> torch.Tensor:
    """Return what all programs for the values of a head share, [chunks, heads, rows, L].

    inputs: the heads of a row are contiguous. queries, keys: the layouts of its queries and keys.
    sizes: the sizes of heads, and whether queries and keys are normalized.
    """
    num_heads, device = sizes["NUM_HEADS"], keys.tensor.device
    num_rows = 4 + CHUNK_SIZE * (1 if inputs.beta_TH is None else 2)
    shape = (plan.num_chunks, num_heads, num_rows, CHUNK_SIZE)
    prepared = torch.empty(shape, dtype=torch.float32, device=device)
    own = ("NUM_HEADS", "REPEATS", "KEY_SIZE", "NORMALIZE")
    prepare_chunks_kernel[(plan.num_chunks, num_heads)](
        queries.tensor,
        keys.tensor,
        inputs.steps_TH,
        inputs.step_bias_H,
        inputs.rates_H,
        inputs.beta_TH,
        plan.chunks_C4,
        prepared,
        queries.outer_stride,
        queries.inner_stride,
        keys.outer_stride,
        keys.inner_stride,
        inputs.steps_TH.stride(0),
        0 if inputs.beta_TH is None else inputs.beta_TH.stride(0),
        *inputs.step_limits,
        inputs.key_eps,
        **{name: sizes[name] for name in own},
        **product_constants(keys.tensor.dtype, device.type),
        num_stages=NUM_STAGES,
    )
    return prepared


@cache
def product_constants(dtype: torch.dtype, device_type: str) -> dict[str, Any]:
    """Return the constants of the products of queries and keys."""
    return {
        "LENGTH": CHUNK_SIZE,
        "PIECE": PIECE * 2 // dtype.itemsize,
        "COMPUTE": compute_type(dtype),
        "PRECISION": precision_of(device_type),
    }

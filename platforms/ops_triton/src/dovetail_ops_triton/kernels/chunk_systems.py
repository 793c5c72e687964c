# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""The systems of equations of the delta rule within chunks, and the decays between their tokens.

Source: Yang et al. 2024, arXiv:2412.06464.
Dimensions: T tokens, H heads, G groups of heads, K features of a key, L tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from dovetail_ops_triton.kernels.state_plan import CHUNK_SIZE, StatePlan
from dovetail_ops_triton.kernels.targets import compute_type, precision_of


@triton.jit
def since(decay_ptrs_L, is_L):
    """Return the sums of the logarithms of decays, [L], and their total."""
    decay_L = tl.load(decay_ptrs_L, mask=is_L, other=0.0)
    return tl.cumsum(decay_L, 0), tl.sum(decay_L, 0)


@triton.jit
def between(sum_L, LENGTH: tl.constexpr):
    """Return exp(c_i - c_j) for j ≤ i, else 0, [L, L]."""
    l_L = tl.arange(0, LENGTH)
    is_causal_LL = l_L[:, None] >= l_L[None]
    exponent_LL = tl.where(is_causal_LL, sum_L[:, None] - sum_L[None], 0.0)
    return tl.where(is_causal_LL, tl.exp(exponent_LL), 0.0)


@triton.jit(do_not_specialize_on_alignment=["chunks_ptr"])
def solve_chunks_kernel(
    k_ptr,
    decay_ptr,
    beta_ptr,
    chunks_ptr,
    solutions_ptr,
    k_token_stride,
    k_group_stride,
    NUM_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Invert the system of the delta rule of one chunk and head. Grid (chunks, heads).

    The result, float32 [chunks, heads, L, L], includes the factor beta of the right side. The rows
    of the inverse are computed one after another, which is accurate for any keys.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(chunks_ptr + 4 * chunk).to(tl.int64)
    size = tl.load(chunks_ptr + 4 * chunk + 1)
    l_L = tl.arange(0, LENGTH)
    k_K = tl.arange(0, KEY_BLOCK)
    is_L = l_L < size
    is_LK = is_L[:, None] & (k_K < KEY_SIZE)[None]
    k_ptr += start * k_token_stride + head // REPEATS * k_group_stride
    key_LK = tl.load(k_ptr + l_L[:, None] * k_token_stride + k_K[None], mask=is_LK, other=0.0)
    key_LK = key_LK.to(COMPUTE)
    places_L = (start + l_L) * NUM_HEADS + head
    sum_L, _total = since(decay_ptr + places_L, is_L)
    beta_L = tl.load(beta_ptr + places_L, mask=is_L, other=0.0)
    products_LL = tl.dot(key_LK, tl.trans(key_LK), input_precision=PRECISION)
    system_LL = products_LL * between(sum_L, LENGTH) * beta_L[:, None]
    system_LL = tl.where(l_L[:, None] > l_L[None], system_LL, 0.0)
    inverse_LL = (l_L[:, None] == l_L[None]).to(tl.float32)
    for i in range(1, size):
        is_row_LL = (l_L == i)[:, None]
        factors_L = tl.sum(tl.where(is_row_LL, system_LL, 0.0), 0)
        row_L = tl.sum(factors_L[:, None] * inverse_LL, 0)
        inverse_LL -= tl.where(is_row_LL, row_L[None], 0.0)
    solutions_ptr += (chunk.to(tl.int64) * NUM_HEADS + head) * (LENGTH * LENGTH)
    places_LL = l_L[:, None] * LENGTH + l_L[None]
    tl.store(solutions_ptr + places_LL, inverse_LL * beta_L[None])


def product_constants(k_TGK: torch.Tensor) -> dict[str, Any]:
    """Return the constants of matrix products within chunks."""
    return {
        "LENGTH": CHUNK_SIZE,
        "COMPUTE": compute_type(k_TGK.dtype),
        "PRECISION": precision_of(k_TGK.device.type),
    }


def solve_chunks(
    k_TGK: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor | None,
    plan: StatePlan,
    constants: dict[str, Any],
) -> torch.Tensor | None:
    """Return the solutions of the delta rule of all chunks, or None without the delta rule."""
    if beta_TH is None:
        return None
    num_heads, length = constants["NUM_HEADS"], constants["LENGTH"]
    shape = (plan.num_chunks, num_heads, length, length)
    solutions = torch.empty(shape, dtype=torch.float32, device=k_TGK.device)
    own = {key: constants[key] for key in constants if not key.startswith("VALUE")}
    solve_chunks_kernel[(plan.num_chunks, num_heads)](
        k_TGK,
        decay_TH,
        beta_TH,
        plan.chunks_C4,
        solutions,
        k_TGK.stride(0),
        k_TGK.stride(1),
        **own,
    )
    return solutions

# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Queries and keys of latent attention: two launches.

One launch multiplies queries by the weights of their head's keys. The other normalizes the latent
vector of a token, and rotates its last features and those of its queries.
Source: DeepSeek-AI 2024, arXiv:2405.04434.
Dimensions: T tokens, H heads, L latent features, N features of a key that are not rotated, R rotary
features, P positions.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import LatentWeights
from dovetail_ops_triton.kernels.head_products import multiply_heads
from dovetail_ops_triton.kernels.row_layout import row_layout

_TILE = 1024
"""Number of elements that a program rotates."""


@triton.jit
def _rotate(x_ptrs, y_ptrs, mask, cos, sin, HALF: tl.constexpr):
    left = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, left * cos - right * sin, mask=mask)
    tl.store(y_ptrs + HALF, right * cos + left * sin, mask=mask)


@triton.jit
def latent_rows_kernel(
    q_ptr,
    latent_ptr,
    norm_ptr,
    queries_ptr,
    keys_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    latent_stride,
    cos_sin_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    """Compute the key of one token, or rotate HEADS of its queries. Grid (tokens, 1 + blocks).

    PLAIN: features of a query that are not rotated. RANK: those of a latent vector. HALF: half of
    the rotated features.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    SIZE: tl.constexpr = RANK + 2 * HALF
    f_F = tl.arange(0, HALF_BLOCK)
    is_F = f_F < HALF
    cos_sin_ptrs_F = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride + f_F
    cos_F = tl.load(cos_sin_ptrs_F, mask=is_F, other=0.0)
    sin_F = tl.load(cos_sin_ptrs_F + HALF, mask=is_F, other=0.0)
    latent_ptr += token * latent_stride
    keys_ptr += token * SIZE
    if block == 0:
        l_L = tl.arange(0, RANK_BLOCK)
        is_L = l_L < RANK
        x_L = tl.load(latent_ptr + l_L, mask=is_L, other=0.0).to(tl.float32)
        norm_L = tl.load(norm_ptr + l_L, mask=is_L, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x_L * x_L, 0) / RANK + eps)
        tl.store(keys_ptr + l_L, x_L * scale * norm_L, mask=is_L)
        _rotate(latent_ptr + RANK + f_F, keys_ptr + RANK + f_F, is_F, cos_F, sin_F, HALF)
    else:
        h_H = (block - 1) * HEADS + tl.arange(0, HEADS)
        is_HF = (h_H < NUM_HEADS)[:, None] & is_F[None]
        q_ptrs_H = q_ptr + token * q_token_stride + h_H * q_head_stride + PLAIN
        y_ptrs_H = queries_ptr + (token * NUM_HEADS + h_H) * SIZE + RANK
        q_ptrs_HF = q_ptrs_H[:, None] + f_F[None]
        _rotate(q_ptrs_HF, y_ptrs_H[:, None] + f_F[None], is_HF, cos_F[None], sin_F[None], HALF)


def latent_inputs(
    q_THF: torch.Tensor,
    latent_TF: torch.Tensor,
    weights: LatentWeights,
    positions_T: torch.Tensor,
    cos_sin_PR: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [T, H, L + R] and keys [T, 1, L + R], new contiguous tensors."""
    q, latent = row_layout(q_THF), row_layout(latent_TF)
    num_tokens, num_heads, size = q_THF.shape
    _, plain, rank = weights.key_HNL.shape
    shape, like = (num_tokens, num_heads, rank + size - plain), {"dtype": q_THF.dtype}
    queries = torch.empty(shape, **like, device=q_THF.device)
    keys = torch.empty((num_tokens, 1, shape[2]), **like, device=q_THF.device)
    if not num_tokens:
        return queries, keys
    multiply_heads(q.tensor[..., :plain], weights.key_HNL.mT, queries[..., :rank])
    constants = kernel_constants(num_heads, plain, rank, size - plain)
    num_blocks = 1 + -(-num_heads // constants["HEADS"])
    latent_rows_kernel[(num_tokens, num_blocks)](
        q.tensor,
        latent.tensor,
        weights.norm_L,
        queries,
        keys,
        positions_T.contiguous(),
        cos_sin_PR,
        q.outer_stride,
        q.inner_stride,
        latent.outer_stride,
        cos_sin_PR.stride(0),
        weights.eps,
        **constants,
    )
    return queries, keys


@cache
def kernel_constants(num_heads: int, plain: int, rank: int, rotary_dim: int) -> dict[str, int]:
    """Return the constants of the kernel for one token's key and queries."""
    half_block = triton.next_power_of_2(rotary_dim // 2)
    return {
        "NUM_HEADS": num_heads,
        "PLAIN": plain,
        "RANK": rank,
        "HALF": rotary_dim // 2,
        "HEADS": min(triton.next_power_of_2(num_heads), max(1, _TILE // (2 * half_block))),
        "RANK_BLOCK": triton.next_power_of_2(rank),
        "HALF_BLOCK": half_block,
    }

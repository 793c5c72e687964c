# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Rotary embedding of queries and keys in one launch, for any strides.

Source: Su et al. 2021, arXiv:2104.09864. Dimensions: T tokens, H query heads, K key-value heads, S
head size, P positions, F half of rotary_dim.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_TILE = 1024
"""Number of elements that a program rotates."""


@triton.jit
def rotary_kernel(
    q_ptr,
    k_ptr,
    q_out_ptr,
    k_out_ptr,
    positions_ptr,
    cos_sin_ptr,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    cos_sin_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Rotate HEADS heads of one token. Query heads come first, then key heads.

    HALF: half of rotary_dim. REST_BLOCK: a power of two not below the number of features that
    are copied unchanged; 0 for none.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    num_query_blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    features = tl.arange(0, HALF_BLOCK)
    turns = features < HALF
    cos_sin_ptrs = cos_sin_ptr + tl.load(positions_ptr + token) * cos_sin_stride + features
    cos = tl.load(cos_sin_ptrs, mask=turns, other=0.0)
    sin = tl.load(cos_sin_ptrs + HALF, mask=turns, other=0.0)
    if block < num_query_blocks:
        _turn(
            q_ptr + token * q_token_stride,
            q_out_ptr + token * (NUM_HEADS * HEAD_SIZE),
            q_head_stride,
            block * HEADS,
            cos,
            sin,
            NUM_HEADS,
            HEAD_SIZE,
            HALF,
            HEADS,
            HALF_BLOCK,
            REST_BLOCK,
        )
    else:
        _turn(
            k_ptr + token * k_token_stride,
            k_out_ptr + token * (NUM_KV_HEADS * HEAD_SIZE),
            k_head_stride,
            (block - num_query_blocks) * HEADS,
            cos,
            sin,
            NUM_KV_HEADS,
            HEAD_SIZE,
            HALF,
            HEADS,
            HALF_BLOCK,
            REST_BLOCK,
        )


@triton.jit
def _turn(
    x_ptr,
    y_ptr,
    head_stride,
    first_head,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    """Rotate the heads of one token from `first_head` on. The pointers point to its first head."""
    heads = first_head + tl.arange(0, HEADS)[:, None]
    features = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (heads < NUM_HEADS) & (features < HALF)
    x_ptrs = x_ptr + heads * head_stride + features
    y_ptrs = y_ptr + heads * HEAD_SIZE + features
    left = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(x_ptrs + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptrs, left * cos[None, :] - right * sin[None, :], mask=mask)
    tl.store(y_ptrs + HALF, right * cos[None, :] + left * sin[None, :], mask=mask)
    if REST_BLOCK > 0:
        rest = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        mask = (heads < NUM_HEADS) & (rest < HEAD_SIZE)
        x = tl.load(x_ptr + heads * head_stride + rest, mask=mask)
        tl.store(y_ptr + heads * HEAD_SIZE + rest, x, mask=mask)


def rotate(
    q_THS: torch.Tensor,
    k_TKS: torch.Tensor,
    positions_T: torch.Tensor,
    cos_sin_PS: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, rotated by their positions (NeoX style), two new contiguous tensors."""
    q_THS, k_TKS = _features_together(q_THS), _features_together(k_TKS)
    num_tokens, num_heads, head_size = q_THS.shape
    heads = (num_heads, k_TKS.shape[1])
    q_out_THS = torch.empty(q_THS.shape, dtype=q_THS.dtype, device=q_THS.device)
    k_out_TKS = torch.empty(k_TKS.shape, dtype=k_TKS.dtype, device=k_TKS.device)
    if not num_tokens:
        return q_out_THS, k_out_TKS
    constants = kernel_constants(heads, head_size, cos_sin_PS.shape[1])
    num_blocks = sum(-(-number // constants["HEADS"]) for number in heads)
    rotary_kernel[(num_tokens, num_blocks)](
        q_THS,
        k_TKS,
        q_out_THS,
        k_out_TKS,
        positions_T.contiguous(),
        cos_sin_PS,
        q_THS.stride(0),
        q_THS.stride(1),
        k_TKS.stride(0),
        k_TKS.stride(1),
        cos_sin_PS.stride(0),
        **constants,
    )
    return q_out_THS, k_out_TKS


@cache
def kernel_constants(heads: tuple[int, int], head_size: int, rotary_dim: int) -> dict[str, int]:
    """Return the compile-time constants of the kernel. heads: numbers of query and key heads."""
    half_block = triton.next_power_of_2(rotary_dim // 2)
    rest = head_size - rotary_dim
    num_together = min(triton.next_power_of_2(max(heads)), max(1, _TILE // (2 * half_block)))
    return {
        "NUM_HEADS": heads[0],
        "NUM_KV_HEADS": heads[1],
        "HEAD_SIZE": head_size,
        "HALF": rotary_dim // 2,
        "HEADS": num_together,
        "HALF_BLOCK": half_block,
        "REST_BLOCK": triton.next_power_of_2(rest) if rest else 0,
    }


def _features_together(x_TNS: torch.Tensor) -> torch.Tensor:
    return x_TNS if x_TNS.stride(-1) == 1 else x_TNS.contiguous()

# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""The router of a mixture of experts: logits, and the experts of each token with their weights.

The products of a token have an order that does not depend on other tokens.
Sources: Shazeer et al. 2017, arXiv:1701.06538; DeepSeek-AI 2024, arXiv:2412.19437.
Dimensions: T tokens, D features, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from dovetail.interfaces.ops import ExpertRouting, RouterWeights
from dovetail_ops_triton.kernels.row_layout import row_layout
from dovetail_ops_triton.kernels.targets import compute_type, precision_of, stages_for

TOKENS = 16
EXPERTS = 16
"""Tokens and experts of a program that computes logits: many programs for a few tokens."""

FEATURES = 128
"""Features of a matrix product for elements of two bytes; half as many for float32."""

NUM_STAGES = 3
CHOICE_WARPS = 1
_LOWEST = tl.constexpr(-1e38)
"""The rank of an expert whose score is NaN. The sum of two is finite."""


@triton.jit(do_not_specialize=["num_tokens"])
def logits_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,  # None: no bias
    logits_ptr,
    num_tokens,
    x_stride,
    weight_stride,
    SIZE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the logits of some tokens and experts, float32. Grid (token and expert blocks)."""
    t_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e_E = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    is_T = t_T < num_tokens
    is_E = e_E < NUM_EXPERTS
    x_ptrs_T = x_ptr + t_T.to(tl.int64) * x_stride
    weight_ptrs_E = weight_ptr + e_E.to(tl.int64) * weight_stride
    total_TE = tl.zeros((TOKENS, EXPERTS), dtype=tl.float32)
    for first in range(0, SIZE, FEATURES):
        d_D = first + tl.arange(0, FEATURES)
        is_D = d_D < SIZE
        x_TD = tl.load(x_ptrs_T[:, None] + d_D[None], mask=is_T[:, None] & is_D[None], other=0.0)
        weight_ED = tl.load(
            weight_ptrs_E[:, None] + d_D[None], mask=is_E[:, None] & is_D[None], other=0.0
        )
        weight_DE = tl.trans(weight_ED.to(COMPUTE))
        total_TE = tl.dot(x_TD.to(COMPUTE), weight_DE, total_TE, input_precision=PRECISION)
    if bias_ptr is not None:
        total_TE += tl.load(bias_ptr + e_E, mask=is_E, other=0.0).to(tl.float32)[None]
    places_TE = t_T.to(tl.int64)[:, None] * NUM_EXPERTS + e_E[None]
    tl.store(logits_ptr + places_TE, total_TE, mask=is_T[:, None] & is_E[None])


@triton.jit
def _keep_groups(
    rank_E,
    SUMS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
):
    """Return the ranks, with -inf for experts outside of the best groups."""
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    e_E = tl.arange(0, EXPERT_BLOCK)
    g_G = tl.arange(0, GROUP_BLOCK)
    worth_G = tl.full((GROUP_BLOCK,), float("-inf"), dtype=tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own_E = tl.where(e_E // SIZE == group, rank_E, float("-inf"))
        worth = tl.max(own_E, 0)
        if SUMS and SIZE > 1:
            best = tl.argmax(own_E, 0)
            worth += tl.max(tl.where(e_E == best, float("-inf"), own_E), 0)
        worth_G = tl.where(g_G == group, worth, worth_G)
    kept_E = tl.full((EXPERT_BLOCK,), float("-inf"), dtype=tl.float32)
    for _ in tl.static_range(TOP_GROUPS):
        group = tl.argmax(worth_G, 0)
        kept_E = tl.where(e_E // SIZE == group, rank_E, kept_E)
        worth_G = tl.where(g_G == group, float("-inf"), worth_G)
    return kept_E


@triton.jit
def choose_kernel(
    logits_ptr,
    correction_ptr,  # None: no correction
    experts_ptr,
    weights_ptr,
    scale,
    NUM_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
):
    """Choose the experts of one token, best first; ties in index order. Grid (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    e_E = tl.arange(0, EXPERT_BLOCK)
    k_K = tl.arange(0, CHOSEN_BLOCK)
    is_E = e_E < NUM_EXPERTS
    logits_E = tl.load(logits_ptr + token * NUM_EXPERTS + e_E, mask=is_E, other=float("-inf"))
    if SIGMOID:
        scores_E = 1.0 / (1.0 + tl.exp(-logits_E))
    else:
        powers_E = tl.exp(logits_E - tl.max(logits_E, 0))
        scores_E = powers_E / tl.sum(powers_E, 0)
    rank_E = scores_E
    if correction_ptr is not None:
        rank_E += tl.load(correction_ptr + e_E, mask=is_E, other=0.0)
    rank_E = tl.where(rank_E == rank_E, rank_E, _LOWEST)
    rank_E = tl.where(is_E, rank_E, float("-inf"))
    if NUM_GROUPS > 1:
        rank_E = _keep_groups(
            rank_E, correction_ptr is not None, NUM_EXPERTS, NUM_GROUPS, TOP_GROUPS,
            EXPERT_BLOCK, GROUP_BLOCK,
        )  # fmt: skip
    experts_K = tl.zeros((CHOSEN_BLOCK,), dtype=tl.int32)
    weights_K = tl.zeros((CHOSEN_BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        best = tl.argmax(rank_E, 0)
        score = tl.sum(tl.where(e_E == best, scores_E, 0.0), 0)
        experts_K = tl.where(k_K == place, best, experts_K)
        weights_K = tl.where(k_K == place, score, weights_K)
        rank_E = tl.where(e_E == best, float("-inf"), rank_E)
    if RENORMALIZE:
        weights_K = weights_K / tl.sum(weights_K, 0)
    places_K = token * TOP_K + k_K
    tl.store(experts_ptr + places_K, experts_K.to(tl.int64), mask=k_K < TOP_K)
    tl.store(weights_ptr + places_K, weights_K * scale, mask=k_K < TOP_K)


def select_experts(
    x_TD: torch.Tensor, router: RouterWeights, routing: ExpertRouting
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, int64 [T, K], best first, and their weights, float32."""
    x, weight = row_layout(x_TD), row_layout(router.weight_ED)
    num_tokens, device = len(x_TD), x_TD.device
    num_experts, size = router.weight_ED.shape
    logits_TE = torch.empty((num_tokens, num_experts), dtype=torch.float32, device=device)
    experts_TK = torch.empty((num_tokens, routing.top_k), dtype=torch.int64, device=device)
    weights_TK = torch.empty((num_tokens, routing.top_k), dtype=torch.float32, device=device)
    if not num_tokens:
        return experts_TK, weights_TK
    grid = (-(-num_tokens // TOKENS), -(-num_experts // EXPERTS))
    logits_kernel[grid](
        x.tensor,
        weight.tensor,
        router.bias_E,
        logits_TE,
        num_tokens,
        x.outer_stride,
        weight.outer_stride,
        SIZE=size,
        NUM_EXPERTS=num_experts,
        **logit_constants(x_TD.dtype, router.weight_ED.dtype, device.type),
        num_stages=stages_for(device.type, NUM_STAGES),
    )
    choose_kernel[(num_tokens,)](
        logits_TE,
        router.correction_E,
        experts_TK,
        weights_TK,
        float(routing.scale),
        **choice_constants(num_experts, routing),
        num_warps=CHOICE_WARPS,
    )
    return experts_TK, weights_TK


@cache
def logit_constants(x: torch.dtype, weight: torch.dtype, device_type: str) -> dict[str, Any]:
    """Return the sizes of programs that compute logits. x, weight: the dtypes of the operands."""
    dtype = x if x == weight else torch.float32
    return {
        "TOKENS": TOKENS,
        "EXPERTS": EXPERTS,
        "FEATURES": FEATURES * 2 // dtype.itemsize,
        "COMPUTE": compute_type(dtype),
        "PRECISION": precision_of(device_type),
    }


@cache
def choice_constants(num_experts: int, routing: ExpertRouting) -> dict[str, Any]:
    """Return the constants of the kernel that chooses experts."""
    return {
        "NUM_EXPERTS": num_experts,
        "TOP_K": routing.top_k,
        "NUM_GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "SIGMOID": routing.scores == "sigmoid",
        "RENORMALIZE": routing.renormalize,
        "EXPERT_BLOCK": triton.next_power_of_2(num_experts),
        "GROUP_BLOCK": triton.next_power_of_2(routing.num_groups),
        "CHOSEN_BLOCK": triton.next_power_of_2(routing.top_k),
    }

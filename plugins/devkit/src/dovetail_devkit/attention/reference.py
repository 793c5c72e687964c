"""The dense float64 reference of attention that backends are compared with.

This module does not depend on a cache, on blocks or on a batch. torch is imported within functions.

Dimensions: H query heads, K key-value heads, G query heads for each of them, D head size,
Q queries and L positions of one sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def reference_attention(
    q_QHD: torch.Tensor,
    k_LKD: torch.Tensor,
    v_LKD: torch.Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    soft_cap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
    slopes_H: torch.Tensor | None = None,
    bidirectional: bool = False,
) -> torch.Tensor:
    """Return the attention of one sequence, float64 [Q, H, D], computed densely.

    Values may have a different number of features than keys; the result has that of the values.
    The queries are the last Q of the L positions. Query head h reads key-value head h // (H / K).
    Window, soft cap, sinks, ALiBi slopes and `bidirectional` are those of `AttentionLayerContext`.
    The arguments are only read.
    """
    import torch

    num_queries, num_heads, head_size = q_QHD.shape
    length, num_kv_heads, _ = k_LKD.shape
    q_QKGD = q_QHD.double().reshape(num_queries, num_kv_heads, -1, head_size)
    scores = torch.einsum("qkgd,lkd->kgql", q_QKGD, k_LKD.double()) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    keys_L = torch.arange(length, device=scores.device)
    queries_Q1 = keys_L[length - num_queries :].unsqueeze(1)
    if slopes_H is not None:
        slopes_KG11 = slopes_H.double().reshape(num_kv_heads, -1, 1, 1)
        scores = scores + slopes_KG11 * (keys_L - queries_Q1)
    hidden = (keys_L > queries_Q1) & (not bidirectional)
    if sliding_window:
        hidden |= keys_L <= queries_Q1 - sliding_window
        hidden |= keys_L >= queries_Q1 + sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks_H is not None:
        sinks_KG11 = sinks_H.double().reshape(num_kv_heads, -1, 1, 1)
        scores = torch.cat([scores, sinks_KG11.expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :length]
    out_QKGD = torch.einsum("kgql,lkd->qkgd", weights, v_LKD.double())
    return out_QKGD.reshape(num_queries, num_heads, v_LKD.shape[-1])

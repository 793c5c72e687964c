"""Code that all reference kernels share: attention of one request, checks, and the recorded calls.

Shape legend: H query heads, K key-value heads, D head size, Q queries and L positions of a request.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from types import SimpleNamespace

import torch

HEAD_SIZES = (64, 128, 256)
ALIGNMENT = 16
LOG_2_E = 1.4426950408889634

MAX_CALLS = 40
calls: deque[tuple[str, dict]] = deque(maxlen=MAX_CALLS)
"""The latest plans and launches: name, and arguments by name."""

numbers = itertools.count(1)
"""Generates the numbers of plans and launches."""


library = torch.library.Library("flashinfer_reference", "DEF")
"""The launches are torch operators, so that the fake device records them in graphs."""


def require(right: bool, text: str) -> None:
    """Raise ValueError with `text` unless `right` is true."""
    if not right:
        raise ValueError(f"the real kernel rejects, ignores or misreads this call: {text}")


def named(names: list[str], args: tuple) -> SimpleNamespace:
    """Return positional arguments by name. Missing arguments at the end are None."""
    require(len(args) <= len(names), f"{len(args)} arguments for {len(names)} parameters")
    return SimpleNamespace(**(dict.fromkeys(names) | dict(zip(names, args, strict=False))))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a query sees, and how scores are computed. sinks_H: float32 or None."""

    scale: float
    soft_cap: float = 0.0
    window_left: int = -1
    causal: bool = True
    sinks_H: torch.Tensor | None = None


def attend(q_QHD, k_LKD, v_PKD, rule: Rule):
    """Return the attention of a request, float32 [Q, H, D], and its logsumexp to base 2, [Q, H].

    The queries are the last Q of L positions. v_PKD: the values that the kernel reads, P ≥ L.
    """
    num_queries, length = q_QHD.shape[0], k_LKD.shape[0]
    group = q_QHD.shape[1] // k_LKD.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (k_LKD, v_PKD))
    scores_HQL = torch.einsum("qhd,lhd->hql", q_QHD.float(), keys) * rule.scale
    if rule.soft_cap:
        scores_HQL = rule.soft_cap * torch.tanh(scores_HQL / rule.soft_cap)
    keys_L = torch.arange(length)
    own_Q1 = keys_L[length - num_queries :, None]
    seen_QL = keys_L <= own_Q1 if rule.causal else torch.ones(num_queries, length).bool()
    if rule.window_left >= 0:
        seen_QL &= keys_L >= own_Q1 - rule.window_left
    scores_HQL = scores_HQL.masked_fill(~seen_QL, float("-inf"))
    if rule.sinks_H is not None:
        sinks_HQ1 = rule.sinks_H[:, None, None].expand(-1, num_queries, 1)
        scores_HQL = torch.cat([scores_HQL, sinks_HQ1], -1)
    weights_HQL = scores_HQL.softmax(-1)[..., :length]
    weights_HQP = torch.nn.functional.pad(weights_HQL, (0, values.shape[0] - length))
    out_QHD = torch.einsum("hqp,phd->qhd", weights_HQP, values)
    return out_QHD, scores_HQL.logsumexp(-1).T * LOG_2_E

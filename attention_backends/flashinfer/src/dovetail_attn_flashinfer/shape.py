"""The properties that the launches of a layer depend on.

Layers of equal shape share one plan per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None]
"""Computes attention for a part of a step. Arguments: q_THD, the cache, sinks_H or None, out_THD; q
and out contain all tokens of the step, and out is contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The properties of a layer that its KV-cache group does not determine.

    dtype: the dtype of queries and results. has_sinks: whether the layer has attention
    sinks.
    """

    num_heads: int
    scale: float
    soft_cap: float
    has_sinks: bool
    dtype: torch.dtype

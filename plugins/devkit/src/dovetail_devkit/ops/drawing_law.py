"""The reference for sampling: computes token probabilities with Python numbers and loops.

Tokens are sorted by logit, largest first, then by column. Temperature divides the logits; min-p
removes tokens with less than min_p times the highest probability; top-k keeps exactly k tokens;
top-p keeps the fewest remaining tokens with a total probability of at least p. This module uses no
tensors and no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DrawParams:
    """The fields of `DrawColumns` for one row. top_k: 0 for all tokens."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def probabilities(logits: Sequence[float], settings: DrawParams) -> list[float]:
    """Return the probability of each column. Logits are finite or -inf. At least one is finite."""
    order = sorted(range(len(logits)), key=lambda column: (-logits[column], column))
    if settings.temperature == 0:
        return [float(column == order[0]) for column in range(len(logits))]
    best = logits[order[0]]
    weights = {c: math.exp((logits[c] - best) / settings.temperature) for c in order}
    left = [c for c in order if weights[c] >= settings.min_p][: settings.top_k or None]
    left = _fewest(left, weights, settings.top_p) if settings.top_p < 1 else left
    mass = math.fsum(weights[c] for c in left)
    probs = [0.0] * len(logits)
    for column in left:
        probs[column] = weights[column] / mass
    return probs


def _fewest(left: list[int], weights: dict[int, float], top_p: float) -> list[int]:
    min_weight = top_p * math.fsum(weights[c] for c in left)
    mass = 0.0
    for number, column in enumerate(left, 1):
        mass += weights[column]
        if mass >= min_weight:
            return left[:number]
    return left

"""Searches for the scales and minima of weight groups that minimize the weighted squared error.

Candidate scales are computed from the largest weights of a group. Each candidate is refined by a
least-squares fit to its codes.
Every function takes float32 groups [..., K] with importances that broadcast to them, and is
computed for all groups at once.
Dimensions: N groups, K values of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_TINY = 1e-30


def search_scale(
    x_NK: torch.Tensor, importance_NK: torch.Tensor, low: int, targets: Sequence[float]
) -> torch.Tensor:
    """Return scales [N, 1] for codes from `low` to -low - 1, of either sign.

    targets: candidates for the scaled value of the greatest magnitude. Its sign is that of `low`,
    so that all codes are used. NaN and infinities give scales that are not finite.
    """
    greatest_N1 = x_NK.gather(-1, x_NK.abs().argmax(-1, keepdim=True))
    weighted_NK = importance_NK * x_NK
    best_N1 = torch.full_like(greatest_N1, -1.0)
    scale_N1 = greatest_N1 / low
    for target in targets:
        inverse_N1 = target / greatest_N1
        codes_NK = (x_NK * inverse_N1).round_().clamp_(low, -low - 1).nan_to_num_(0.0)
        products_N1 = (weighted_NK * codes_NK).sum(-1, keepdim=True)
        squares_N1 = (importance_NK * codes_NK.square_()).sum(-1, keepdim=True).clamp_min_(_TINY)
        # The error is a constant minus this gain, if the scale is the best one for these codes.
        gain_N1 = products_N1.square() / squares_N1
        is_better_N1 = gain_N1 > best_N1
        best_N1 = torch.where(is_better_N1, gain_N1, best_N1)
        scale_N1 = torch.where(is_better_N1, products_N1 / squares_N1, scale_N1)
    return scale_N1


def search_range(
    x_NK: torch.Tensor, importance_NK: torch.Tensor, highest: int, spans: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and minima [N, 1] for codes from 0 to `highest`: x ≈ scale · code + minimum.

    Minima are at most 0, as the block types with two levels require. spans: candidates for the
    number of steps between the least and the greatest weight.
    """
    least_N1 = x_NK.amin(-1, keepdim=True).clamp_max_(0.0)
    range_N1 = (x_NK.amax(-1, keepdim=True) - least_N1).clamp_min_(_TINY)
    total_N1 = importance_NK.expand_as(x_NK).sum(-1, keepdim=True)
    weighted_NK = importance_NK * x_NK
    sum_x_N1 = weighted_NK.sum(-1, keepdim=True)
    best_N1 = torch.full_like(least_N1, torch.inf)
    scale_N1, minimum_N1 = range_N1 / highest, least_N1.clone()
    for span in spans:
        codes_NK = ((x_NK - least_N1) * (span / range_N1)).round_().clamp_(0, highest)
        weighted_codes_NK = importance_NK * codes_NK
        sum_q_N1 = weighted_codes_NK.sum(-1, keepdim=True)
        sum_qq_N1 = (weighted_codes_NK * codes_NK).sum(-1, keepdim=True)
        sum_xq_N1 = (weighted_codes_NK * x_NK).sum(-1, keepdim=True)
        determinant_N1 = total_N1 * sum_qq_N1 - sum_q_N1.square()
        a_N1 = (total_N1 * sum_xq_N1 - sum_x_N1 * sum_q_N1) / determinant_N1
        b_N1 = (sum_qq_N1 * sum_x_N1 - sum_q_N1 * sum_xq_N1) / determinant_N1
        # A minimum above 0 is not allowed: then 0, with the best scale for it.
        is_above_N1 = b_N1 > 0
        a_N1 = torch.where(is_above_N1, sum_xq_N1 / sum_qq_N1.clamp_min(_TINY), a_N1)
        b_N1 = b_N1.clamp_max(0.0)
        # The weighted squared error without its constant part.
        error_N1 = (
            a_N1.square() * sum_qq_N1
            + b_N1.square() * total_N1
            + 2 * (a_N1 * b_N1 * sum_q_N1 - a_N1 * sum_xq_N1 - b_N1 * sum_x_N1)
        )
        is_better_N1 = (error_N1 < best_N1) & (determinant_N1 > 0) & (a_N1 > 0)
        best_N1 = torch.where(is_better_N1, error_N1, best_N1)
        scale_N1 = torch.where(is_better_N1, a_N1, scale_N1)
        minimum_N1 = torch.where(is_better_N1, b_N1, minimum_N1)
    return scale_N1, minimum_N1

"""Sample one column from rows of unnormalized probabilities, by the inverse of the CDF.

A token of probability 0 is never sampled, despite rounding. This module does not depend on how the
probabilities or the uniform numbers are computed. Dimensions: R rows, V vocabulary, N numbers, few
enough for a sequential sum.
"""

from __future__ import annotations

import torch

from dovetail_torch.sampling.blocks import block_sums, gather_blocks

DRAW_WIDTH = 512
_MIN_LOG = -87.0
_NOTHING = 2e-38
"""A number above exp(_LEAST_LOG) and above the smallest normal float32."""


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 for devices without float64.

    With float32, tokens of probability 0 are still never sampled, but probabilities have an error
    of about 1e-6.
    """
    try:
        torch.ones(1, dtype=torch.float64, device=device).cumsum(0)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def pick(cumulative_RN: torch.Tensor, target_R1: torch.Tensor) -> torch.Tensor:
    """Return the first column whose cumulative sum is above the target, int64 [R, 1].

    The target is first reduced below the row's last sum, so that the selected column never has
    probability 0. The column is 0 for a row without mass or with NaN.
    """
    total_R1 = cumulative_RN[:, -1:]
    below_R1 = torch.nextafter(total_R1, torch.zeros_like(total_R1))
    column_R1 = (cumulative_RN <= torch.minimum(target_R1, below_R1)).sum(-1, keepdim=True)
    return column_R1.masked_fill_(column_R1 >= cumulative_RN.shape[1], 0)


def exponentiate(logits_RV: torch.Tensor) -> torch.Tensor:
    """Replace logits by exp(logit - best), in place, and return them.

    Results of 2e-38 or less, in particular for -inf, become exactly 0, because a denormal
    exponential takes thirty times as long as others. A row in which all logits are -inf becomes
    zeros, not NaN.
    """
    best_R1 = logits_RV.amax(-1, keepdim=True).clamp_min_(torch.finfo(logits_RV.dtype).min)
    weights_RV = logits_RV.sub_(best_R1).clamp_min_(_MIN_LOG).exp_()
    return torch.threshold_(weights_RV, _NOTHING, 0.0)


def draw(weights_RV: torch.Tensor, uniform_R1: torch.Tensor) -> torch.Tensor:
    """Sample a column of each row in proportion to its float32 weights, int64 [R].

    uniform_R1: in [0, 1), of the accumulation dtype. Samples a block and then a column of it: no
    sum has more than a few hundred numbers, so that a vocabulary of 150,000 tokens needs one pass
    and no precision is lost.
    """
    cumulative_RC = block_sums(weights_RV, DRAW_WIDTH).to(uniform_R1.dtype).cumsum(-1)
    target_R1 = uniform_R1 * cumulative_RC[:, -1:]
    block_R1 = pick(cumulative_RC, target_R1)
    before_R1 = cumulative_RC.gather(1, (block_R1 - 1).clamp_min_(0)).masked_fill_(block_R1 == 0, 0)
    values_RN, columns_RN = gather_blocks(weights_RV, block_R1, DRAW_WIDTH, 0.0)
    inside_R1 = pick(values_RN.to(uniform_R1.dtype).cumsum(-1), target_R1 - before_R1)
    return columns_RN.gather(1, inside_R1).squeeze(1)

"""Penalties on tokens that already occurred: repetition, frequency, presence.

Changes only the logits of tokens in a row's history. This module does not depend on how histories
are stored. Dimensions: S rows of the batch, V vocabulary, R penalized rows, L tokens of the longest
row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail_torch.sampling.history import Past, Tracked

MIN_REPETITION = 1e-20
"""Minimum of the repetition penalty: smaller values would give infinite logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PenaltyColumns:
    """The penalized rows of a batch, and their penalties, each float32 [R, 1]."""

    tracked: Tracked
    repetition_R1: torch.Tensor
    frequency_R1: torch.Tensor
    presence_R1: torch.Tensor


def apply_penalties(logits_SV: torch.Tensor, columns: PenaltyColumns, past: Past) -> None:
    """Penalize float32 logits in place.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output
    (Keskar et al. 2019); frequency subtracts once per occurrence, and presence once, for tokens
    in the output.
    """
    at = (columns.tracked.index_R.unsqueeze(1), past.tokens_RL)
    old_RL = logits_SV[at]
    new_RL = torch.where(old_RL > 0, old_RL / columns.repetition_R1, old_RL * columns.repetition_R1)
    new_RL -= columns.frequency_R1 * past.counts_RL
    new_RL -= columns.presence_R1 * (past.counts_RL > 0)
    # A token that occurs several times is written several times, with the same number.
    logits_SV.index_put_(at, torch.where(past.lengths_R1 > 0, new_RL, old_RL))

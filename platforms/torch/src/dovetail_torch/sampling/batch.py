"""The groups of a batch's rows for sampling, and their parameters as columns.

Computed when the rows of the batch change, else reused. This module does not depend on logits.
Dimensions: S rows of the batch, R rows of a group within it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.interfaces.ops import DrawColumns
from dovetail_torch.sampling.history import Tracked
from dovetail_torch.sampling.penalties import PenaltyColumns
from dovetail_torch.sampling.truncation import Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of a batch with the same code path. index_R: indices of the rows in the batch, int64."""

    index_R: torch.Tensor
    whole: bool

    def select(self, x_S: torch.Tensor) -> torch.Tensor:
        """Return the group's rows of `x_S`: a copy, or `x_S` itself if the group has all rows."""
        return x_S if self.whole else x_S.index_select(0, self.index_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomGroup(Group):
    """Rows that sample at random, with their temperature and min-p.

    temperature_R1, log_min_p_R1: float32. has_min_p: whether any row uses min-p.
    """

    temperature_R1: torch.Tensor
    log_min_p_R1: torch.Tensor
    has_min_p: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedGroup(RandomGroup):
    """Rows that sample at random after top-k or top-p."""

    cuts: Cuts


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawNumbers:
    """The inputs of an op provider's `draw_tokens`, with one number per row. See `DrawColumns`."""

    temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor
    seeds_R: torch.Tensor

    def at(self, positions_R: torch.Tensor) -> DrawColumns:
        """Return the columns to sample the token after `num_tokens` tokens, int64 [R]."""
        return DrawColumns(
            temperature_R=self.temperature_R,
            top_k_R=self.top_k_R,
            top_p_R=self.top_p_R,
            min_p_R=self.min_p_R,
            seeds_R=self.seeds_R,
            positions_R=positions_R,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The rows of a step, divided into groups.

    host_rows: the rows as an array.
    greedy: rows that take the most likely token. unranked: rows that sample from all tokens.
    ranked: rows that sample after top-k or top-p. An empty group is None, also in the next fields.
    draw: all rows, if some sample at random and the op provider samples; it replaces the three
    groups. tracked: rows with a history; penalties: tracked rows with
    penalties.
    reporting: rows that requested log-probabilities; num_logprobs: the number requested by each
    row, -1 for none.
    """

    rows: tuple[int, ...]
    host_rows: NDArray[np.int64]
    greedy: Group | None
    unranked: RandomGroup | None
    ranked: RankedGroup | None
    draw: DrawNumbers | None
    tracked: Tracked | None
    penalties: PenaltyColumns | None
    reporting: Group | None
    num_logprobs: tuple[int, ...]

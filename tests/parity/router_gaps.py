"""Finds positions at which rounding errors decide which experts a token gets.

Two correct float32 computations can select different experts if the scores of the last selected
expert and the first unselected one are almost equal. Logits of that position, and of all later
ones, then differ by far more than rounding errors, and neither computation is wrong.

Dimensions: E experts or groups of experts, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MIN_GAP = 1e-5
"""A smaller gap is a tie. Rounding errors of router logits are near 1e-6."""

Gaps = Callable[[Sequence[int]], torch.Tensor]
"""Maps token ids to the smallest gap at each of them, [T], infinite without routers."""


class RouterGaps(TorchFunctionMode):
    """Records the gaps of a forward pass over one sequence.

    Every router of transformers selects groups and experts by `topk` over the scores of each
    token. So the gaps are those of the family's own selection, with its biases and masked groups.
    Other calls of `topk`, such as the sum of the largest scores of a group, are not recorded: they
    are continuous.

    smallest_T: the smallest gap of each token over all layers, float64, in units of router logits:
    a gap of probabilities is relative. num_selections: recorded calls.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.smallest_T = torch.full((num_tokens,), float("inf"), dtype=torch.float64)
        self.num_selections = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            self._record(*args, **kwargs)
        return func(*args, **kwargs)

    def _record(self, input: torch.Tensor, k: int, dim: int = -1, **_: Any) -> None:
        num_tokens = len(self.smallest_T)
        is_selection = input.shape[:-1] in ((num_tokens,), (1, num_tokens))
        if not is_selection or dim not in (-1, input.ndim - 1):
            return
        self.num_selections += 1
        if k >= input.shape[-1]:
            return
        scores_TE = input.reshape(num_tokens, -1).double()
        top = scores_TE.topk(k + 1).values
        gap_T = top[:, k - 1] - top[:, k]
        if scores_TE.min() >= 0 and scores_TE.max() <= 1:
            gap_T = gap_T / top[:, k - 1]
        # fmin ignores NaN: the gap of two experts of masked groups, which have no weight.
        self.smallest_T = torch.fmin(self.smallest_T, gap_T)


def first_tie(gap_T: torch.Tensor) -> int:
    """Return the first position with a tie, or the number of positions."""
    ties = (gap_T < MIN_GAP).nonzero()
    return int(ties[0]) if len(ties) else len(gap_T)

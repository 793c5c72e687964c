"""Checks of a model's structure that need no other implementation of it.

Positions affect the model's output; queries and keys are rotated by the step's positions; every row
of a table of learned positions is read; hidden states are the output of a final norm. Other errors
are found only by a comparison with a reference implementation. Imports torch.

Legend: T tokens, D hidden size, H query and K key-value heads, R rotary size, P positions.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail_devkit.expectation import NotHere, expect

POSITIONS, FINAL_NORM = "positions", "final_norm"
"""Parts that a model may omit: the ids of its attribute `lacks`."""

WIDEST = 160
"""Larger hidden sizes need too many tokens to detect a final norm."""
FLATNESS = 1e-3
"""Bound on the least singular value of normed hidden states; without a norm it is 10 times more."""


class WatchedOps:
    """Ops that check the positions by which queries and keys are rotated, and delegate to `ops`.

    positions: of the current step, int64 [T], or None to disable the check.
    """

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.positions: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rotary_embedding(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin_PR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate, and check that the positions are those of the step."""
        due = self.positions
        expect(
            due is None or torch.equal(positions_T, due),
            f"queries and keys are rotated by other positions than the step's: "
            f"{positions_T.tolist()[:8]}, not {[] if due is None else due.tolist()[:8]}",
        )
        rotated: tuple[torch.Tensor, torch.Tensor] = self._ops.rotary_embedding(
            q_THD, k_TKD, positions_T, cos_sin_PR
        )
        return rotated


def lacks(model: Any, part: str) -> bool:
    """Return whether a model declares that it omits a part."""
    declared: frozenset[str] = getattr(type(model), "lacks", frozenset())
    unknown = set(declared) - {POSITIONS, FINAL_NORM}
    expect(not unknown, f"lacks names {sorted(unknown)}; it may name final_norm and positions")
    return part in declared


def position_tables(model: Any, num_positions: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return the weights with a row for each position, by name.

    num_positions: the config's. Tables with more rows are ignored: the model has a reason for them.
    """
    if num_positions == vocab_size:
        return {}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and weight.shape[0] == num_positions and "position" in _words(name)
    }


def _words(name: str) -> str:
    """Return a weight's name with common abbreviations of "position" expanded."""
    return name.lower().replace("wpe", "position").replace("pos_emb", "position")


def check_norm(hidden_TD: torch.Tensor) -> None:
    """Raise AssertionError unless hidden states come from a norm with a weight and optional bias.

    Divided by the weight, they have one length (RMSNorm), around the bias (LayerNorm): they lie on
    an ellipsoid along the axes, so Σ_d (a_d h_d² + b_d h_d) = 1 has a solution for all tokens. The
    hidden states of a residual stream have none, if there are more tokens than unknown numbers.
    """
    hidden = hidden_TD.double()
    expect(bool(hidden.isfinite().all()), "hidden states are not finite")
    ones = torch.ones_like(hidden[:, :1])
    columns = torch.cat((hidden.square(), hidden, ones), dim=-1)
    columns = columns / columns.norm(dim=0, keepdim=True).clamp(min=1e-30)
    least = float(torch.linalg.svdvals(columns)[-1])
    expect(
        least < FLATNESS,
        "hidden states do not come from a final norm: no weight gives them equal lengths "
        f"(least singular value {least:.2g}, at most {FLATNESS:g}). Apply it in forward(); a model "
        "without one declares lacks = frozenset({'final_norm'})",
    )


def tokens_for_norm(hidden_size: int) -> int:
    """Return how many tokens are needed to detect a norm; NotHere for wide models."""
    if hidden_size > WIDEST:
        raise NotHere(f"a hidden size of {hidden_size} needs too many tokens; give a small config")
    return 3 * (2 * hidden_size + 1)

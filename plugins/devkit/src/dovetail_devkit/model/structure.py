"""What the model suite can tell of a model's structure without another implementation of it.

Positions reach the model's output; what rotates queries and keys is given the step's own positions;
a table of learned positions is read from its first row to its last; hidden states come after a last
norm. What none of this shows, a reference does, where the author has one. Imports torch.

Legend: T tokens, D hidden size, H query and K key-value heads, R rotary size, P positions.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail_devkit.expectation import NotHere, expect

POSITIONS, FINAL_NORM = "positions", "final_norm"
"""What a model may do without: the ids of its attribute `lacks`."""

WIDEST = 160
"""Hidden sizes above this need too many tokens to show a last norm."""
FLATNESS = 1e-3
"""Least singular value of normed hidden states, at most; without a norm it is ten times that."""


class WatchedOps:
    """Ops that hold the positions that queries and keys are rotated by; all else is `ops`'s own.

    positions: of the step under way, int64 [T], or None while nobody looks.
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
        """Rotate as the ops do, by the step's positions and no others."""
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
    """Return whether a model declares that it does without a part."""
    declared: frozenset[str] = getattr(type(model), "lacks", frozenset())
    unknown = set(declared) - {POSITIONS, FINAL_NORM}
    expect(not unknown, f"lacks names {sorted(unknown)}; it may name final_norm and positions")
    return part in declared


def position_tables(model: Any, num_positions: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return the weights with a row for each position, by name.

    num_positions: the config's. Tables with further rows are left out: who has any knows why.
    """
    if num_positions == vocab_size:
        return {}
    return {
        name: weight
        for name, weight in model.named_parameters()
        if weight.ndim == 2 and weight.shape[0] == num_positions and "position" in _words(name)
    }


def _words(name: str) -> str:
    """Return a weight's name with the usual short forms of "position" written out."""
    return name.lower().replace("wpe", "position").replace("pos_emb", "position")


def check_norm(hidden_TD: torch.Tensor) -> None:
    """Raise AssertionError unless hidden states come from a norm with a weight, and maybe a bias.

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
        "hidden states do not come from a last norm: no weight makes them of one length "
        f"(least singular value {least:.2g}, at most {FLATNESS:g}). Apply it in forward(); a model "
        "without one declares lacks = frozenset({'final_norm'})",
    )


def tokens_for_norm(hidden_size: int) -> int:
    """Return how many tokens show whether hidden states are normed; NotHere for wide models."""
    if hidden_size > WIDEST:
        raise NotHere(f"a hidden size of {hidden_size} needs too many tokens; give a small config")
    return 3 * (2 * hidden_size + 1)

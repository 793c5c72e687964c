"""Checks of a model's structure that need no reference implementation.

Positions must affect the output. Queries and keys must be rotated by the step's positions. Every
row of a table of learned positions must be read. Hidden states must come from a final norm. Other
errors are found only by a comparison with a reference implementation. This module imports torch.

Dimensions: T tokens, D hidden size, H query and K key-value heads, R rotary_dim, P positions.
"""

from __future__ import annotations

from typing import Any

import torch

from dovetail_devkit.expectation import SkipCase, expect

POSITIONS, FINAL_NORM = "positions", "final_norm"
"""Ids of parts that a model may omit. The attribute `lacks` of such a model lists them."""

WIDEST = 160
"""The largest hidden size for which the final norm is checked. A larger size would need too many
tokens."""
FLATNESS = 1e-3
"""Maximum of the smallest singular value for hidden states that come from a norm.

Without a norm, the smallest singular value is at least 10 times larger."""


class WatchedOps:
    """Ops that check the positions of rotary embeddings and then call `ops`.

    positions: positions of the current step, int64 [T], or None to disable the check.
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
        """Rotate queries and keys. Check that the positions belong to the step."""
        due = self.positions
        expect(
            due is None or torch.equal(positions_T, due),
            f"queries and keys are rotated by the positions {positions_T.tolist()[:8]}, but the "
            f"step's positions are {[] if due is None else due.tolist()[:8]}",
        )
        rotated: tuple[torch.Tensor, torch.Tensor] = self._ops.rotary_embedding(
            q_THD, k_TKD, positions_T, cos_sin_PR
        )
        return rotated


def lacks(model: Any, part: str) -> bool:
    """Return whether a model declares that it omits a part."""
    declared: frozenset[str] = getattr(type(model), "lacks", frozenset())
    unknown = set(declared) - {POSITIONS, FINAL_NORM}
    expect(
        not unknown,
        f"the attribute lacks contains {sorted(unknown)}; only final_norm and positions are valid",
    )
    return part in declared


def position_tables(model: Any, num_positions: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Return the weights with a row for each position, by name.

    num_positions: the number of positions in config.json. Tables with more rows are ignored.
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
    """Raise AssertionError if a model does not end with a norm with a weight and optional bias.

    If the bias is subtracted and the result is divided by the weight, normed hidden states have
    equal lengths. They therefore lie on an ellipsoid with axes parallel to the coordinates, and Σ_d
    (a_d h_d² + b_d h_d) = 1 has a solution for all tokens. For the hidden states of a residual
    stream, this equation has no solution if there are more tokens than unknowns.
    """
    hidden = hidden_TD.double()
    expect(bool(hidden.isfinite().all()), "forward returns NaN or infinite hidden states")
    ones = torch.ones_like(hidden[:, :1])
    columns = torch.cat((hidden.square(), hidden, ones), dim=-1)
    columns = columns / columns.norm(dim=0, keepdim=True).clamp(min=1e-30)
    minimum = float(torch.linalg.svdvals(columns)[-1])
    expect(
        minimum < FLATNESS,
        f"the hidden states do not come from a final norm: no weight scales them to equal lengths "
        f"(smallest singular value {minimum:.2g}, expected at most {FLATNESS:g}). Apply the norm "
        f"in forward(). A model without a final norm declares lacks = frozenset({'final_norm'})",
    )


def tokens_for_norm(hidden_size: int) -> int:
    """Return how many tokens are needed to detect a norm. Raise SkipCase for wide models."""
    if hidden_size > WIDEST:
        raise SkipCase(
            f"the hidden size {hidden_size} is too large for this check, which supports at most "
            f"{WIDEST}"
        )
    return 3 * (2 * hidden_size + 1)

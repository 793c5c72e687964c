"""Metrics of single positions from logits, to compare two engines token by token.

Needs only numpy, because other engines have separate Python environments. Dimensions: P positions,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quality.metrics import SLAB_ROWS, Recorder, log_softmax


@dataclass(kw_only=True)
class Positions:
    """Metrics of the positions of a text.

    nll: negative log-likelihood of the next token. best: the most likely token. margin: by how much
    its logit exceeds the second largest logit.
    """

    nll: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)


class PositionRecorder:
    """Receives the logits of each chunk, with the methods of `Recorder`."""

    def __init__(self) -> None:
        self.texts: dict[str, Positions] = {}

    def begin(self, text: str, number: int, token_ids: Sequence[int]) -> None:
        """Start a chunk."""
        self._positions = self.texts.setdefault(text, Positions())
        self._targets = np.array(token_ids[1:], dtype=np.int64)

    def add(self, logits_PV: np.ndarray) -> None:
        """Process the logits of the next positions, float32. Raises RuntimeError for NaN."""
        for start in range(0, len(logits_PV), SLAB_ROWS):
            rows_PV = logits_PV[start : start + SLAB_ROWS]
            if not np.isfinite(rows_PV).all():
                raise RuntimeError("the engine computed logits that are NaN or infinite")
            targets_P, self._targets = np.split(self._targets, [len(rows_PV)])
            if len(targets_P) != len(rows_PV):
                raise RuntimeError("the engine computed more positions than the chunk has")
            nll_P = -log_softmax(rows_PV)[np.arange(len(rows_PV)), targets_P]
            second_P, first_P = np.partition(rows_PV, -2)[:, -2:].T
            self._positions.nll += nll_P.tolist()
            self._positions.best += rows_PV.argmax(-1).tolist()
            self._positions.margin += (first_P - second_P).tolist()

    def end(self) -> None:
        """Finish the chunk. Raises RuntimeError if positions are missing."""
        if len(self._targets):
            raise RuntimeError(f"{len(self._targets)} positions of the chunk are missing")

    def result(self) -> dict[str, Any]:
        """Return the metrics of each text as lists."""
        return {name: vars(positions) for name, positions in self.texts.items()}


AnyRecorder = Recorder | PositionRecorder
"""The object to which an engine passes its logits."""

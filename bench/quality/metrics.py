"""Computes metrics from logits: log-likelihood, KL divergence from references, most likely tokens.

The script needs only numpy, because other engines have separate Python environments. The logits of
a reference are in memory-mapped files. `SLAB_ROWS` rows are processed at a time, so memory does not
grow with the text. Dimensions: P positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SLAB_ROWS = 64


class MetricSums:
    """Sums over the positions of one text. kl, same: by the name of the reference."""

    def __init__(self, references: Sequence[str]) -> None:
        self.nll, self.num_positions = 0.0, 0
        self.kl = dict.fromkeys(references, 0.0)
        self.same = dict.fromkeys(references, 0)

    def result(self) -> dict[str, Any]:
        """Return the means over the positions."""
        count = self.num_positions
        return {
            "num_positions": count,
            "nll": self.nll / count,
            "perplexity": math.exp(self.nll / count),
            "kl": {name: total / count for name, total in self.kl.items()},
            "same_best": {name: total / count for name, total in self.same.items()},
        }


class Recorder:
    """Receives the logits of each chunk.

    references: directories with the logits of references, by name. save_to: a directory for the
    logits of this engine, or None.
    """

    def __init__(self, references: Mapping[str, str], save_to: str | None) -> None:
        self._folders = {name: Path(folder) for name, folder in references.items()}
        self._save_to = None if save_to is None else Path(save_to)
        self.texts: dict[str, MetricSums] = {}

    def begin(self, text: str, number: int, token_ids: Sequence[int]) -> None:
        """Start a chunk. Then pass the logits after each token except the last one to `take`."""
        self._sums = self.texts.setdefault(text, MetricSums(list(self._folders)))
        self._targets = np.array(token_ids[1:], dtype=np.int64)
        self._done = 0
        self._file = f"{text}-{number}.npy"
        self._saved: Any = None
        self._known = {
            name: np.load(folder / self._file, mmap_mode="r")
            for name, folder in self._folders.items()
        }

    def add(self, logits_PV: np.ndarray) -> None:
        """Process the logits of the next positions, float32."""
        for start in range(0, len(logits_PV), SLAB_ROWS):
            self._add_slab(logits_PV[start : start + SLAB_ROWS])

    def end(self) -> None:
        """Finish the chunk. Raises RuntimeError if positions are missing."""
        if self._done != len(self._targets):
            raise RuntimeError(
                f"the engine computed the logits of {self._done} of {len(self._targets)} positions"
            )
        self._saved, self._known = None, {}

    def result(self) -> dict[str, Any]:
        """Return the metrics of each text."""
        return {name: sums.result() for name, sums in self.texts.items()}

    def _add_slab(self, logits_PV: np.ndarray) -> None:
        rows = slice(self._done, self._done + len(logits_PV))
        targets_P = self._targets[rows]
        if len(targets_P) != len(logits_PV):
            raise RuntimeError(f"the engine computed more than {len(self._targets)} positions")
        if not np.isfinite(logits_PV).all():
            raise RuntimeError("the engine computed logits that are NaN or infinite")
        self._save(rows, logits_PV)
        log_q_PV = log_softmax(logits_PV)
        sums = self._sums
        sums.nll -= float(log_q_PV[np.arange(len(targets_P)), targets_P].sum(dtype=np.float64))
        sums.num_positions += len(targets_P)
        best_P = logits_PV.argmax(-1)
        for name, known in self._known.items():
            log_p_PV = log_softmax(known[rows])
            terms_PV = np.exp(log_p_PV) * (log_p_PV - log_q_PV)
            sums.kl[name] += float(terms_PV.sum(dtype=np.float64))
            sums.same[name] += int((known[rows].argmax(-1) == best_P).sum())
        self._done = rows.stop

    def _save(self, rows: slice, logits_PV: np.ndarray) -> None:
        if self._save_to is None:
            return
        if self._saved is None:
            self._save_to.mkdir(parents=True, exist_ok=True)
            shape = (len(self._targets), logits_PV.shape[1])
            self._saved = np.lib.format.open_memmap(
                self._save_to / self._file, "w+", np.float32, shape
            )
        self._saved[rows] = logits_PV


def log_softmax(logits_PV: np.ndarray) -> np.ndarray:
    """Return log-probabilities, float32. Sums are float64."""
    shifted_PV = logits_PV - logits_PV.max(-1, keepdims=True)
    sums_P1 = np.exp(shifted_PV).sum(-1, keepdims=True, dtype=np.float64)
    return shifted_PV - np.log(sums_P1).astype(np.float32)

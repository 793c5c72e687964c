"""A logits processor as a step extension: `logits` applies it, `after_sampling` calls `accept`.

Dimensions: V vocabulary, R rows that use the processor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.interfaces import LogitsProcessor, StepExtension
from dovetail.plan import NewRequest


class ProcessorExtension(StepExtension):
    """Calls one logits processor."""

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def join(self, row: int, request: NewRequest) -> bool:
        """Return whether the request uses the processor."""
        return self._processor.join(request)

    def leave(self, row: int) -> None:
        """Remove `row` from the processor."""
        self._processor.leave(row)

    def logits(self, rows: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
        """Return the logits that the processor returns."""
        return self._processor.apply(logits_RV, rows)

    def after_sampling(self, rows: Sequence[int], token_ids_R: torch.Tensor) -> None:
        """Pass the tokens to the processor."""
        self._processor.accept(rows, token_ids_R)

"""The logits processors of a worker, as one: who takes part in which, and in which order.

Keeps for each processor the rows that take part in it, so that a step without such rows stops at
one look at a set. Knows nothing of what a processor does.
Legend: S rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dovetail.interfaces import LogitsProcessor
from dovetail.plan import NewRequest
from dovetail_torch.sampling.device_access import Upload


class RowProcessors:
    """Calls each processor as its contract says. rows: those that take part in any."""

    def __init__(self, processors: Sequence[LogitsProcessor], upload: Upload) -> None:
        """upload: brings numbers to the logits' device."""
        self._upload = upload
        self.rows: set[int] = set()
        self._parts: list[tuple[LogitsProcessor, set[int]]] = [(one, set()) for one in processors]

    def join(self, request: NewRequest) -> None:
        """Ask each processor whether the request's row takes part, from scratch."""
        self.leave(request.row)
        for processor, own in self._parts:
            if processor.join(request):
                own.add(request.row)
                self.rows.add(request.row)

    def leave(self, row: int) -> None:
        """Forget `row`."""
        if row not in self.rows:
            return
        self.rows.discard(row)
        for processor, own in self._parts:
            if row in own:
                own.discard(row)
                processor.leave(row)

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the float32 logits after all processors, in the order in which they were named."""
        if not self.rows or self.rows.isdisjoint(rows):
            return logits_SV
        for processor, own in self._parts:
            if not own.isdisjoint(rows):
                logits_SV = processor.apply(logits_SV, rows)
        return logits_SV

    def accept(self, rows: Sequence[int], token_ids_S: torch.Tensor) -> None:
        """Tell each processor the tokens that were chosen for its rows."""
        if not self.rows or self.rows.isdisjoint(rows):
            return
        for processor, own in self._parts:
            index = [place for place, row in enumerate(rows) if row in own]
            if len(index) == len(rows):
                processor.accept(rows, token_ids_S)
            elif index:
                index_R = self._upload(np.array(index, np.int64))
                processor.accept([rows[i] for i in index], token_ids_S.index_select(0, index_R))

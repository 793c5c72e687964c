"""A fake logits processor: the next token is the last token plus 1.

Dimensions: S rows of the step, V vocabulary, R rows that this processor handles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.logits_processor import LogitsProcessor, LogitsProcessorContext
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

ARGUMENT = "fake_count_up"
BONUS = 1000.0


class FakeLogitsProcessor(LogitsProcessor):
    """Increases the logit of the token id (last token + 1), if `fake_count_up` is True."""

    example_args: ClassVar[Mapping[str, object]] = {ARGUMENT: True}

    def __init__(self, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._last: dict[int, int] = {}

    @classmethod
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError unless the argument is True, False or absent."""
        value = params.extra_args.get(ARGUMENT, False)
        if not isinstance(value, bool):
            message = f"extra_args[{ARGUMENT!r}]={value!r} must be True or False."
            raise RequestError(message, parameter=f"extra_args.{ARGUMENT}")

    def join(self, request: NewRequest) -> bool:
        """Store the last token of the request."""
        self.leave(request.row)
        if not request.sampling_params.extra_args.get(ARGUMENT, False):
            return False
        self._last[request.row] = request.token_ids[-1]
        return True

    def leave(self, row: int) -> None:
        """Delete the last token of the row."""
        self._last.pop(row, None)

    def apply(self, logits_SV: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Increase the logit of the token id (last token + 1) in each row."""
        for index, row in enumerate(rows):
            if row in self._last:
                logits_SV[index, (self._last[row] + 1) % self._vocab_size] += BONUS
        return logits_SV

    def accept(self, rows: Sequence[int], token_ids_R: torch.Tensor) -> None:
        """Store the sampled tokens as the last tokens."""
        self._last.update(zip(rows, token_ids_R.tolist(), strict=True))

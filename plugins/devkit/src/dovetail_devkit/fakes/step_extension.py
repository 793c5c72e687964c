"""A fake step extension: the next token is the last token plus 1.

The extension can fail on request.

Dimensions: T tokens of the rows, D hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.step_extension import (
    ExtensionBatch,
    StepExtension,
    StepExtensionContext,
)
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

ARGUMENT = "fake_step_extension"
BONUS = 1000.0
FAIL_IN = ("join", "before_forward", "hidden_states", "logits", "after_sampling")


class FakeStepExtension(StepExtension):
    """Increases the logit of the token id (last token + 1) in each row.

    A request enables it with `extra_args={"fake_step_extension": "count_up"}`. If the value is the
    name of a hook instead of "count_up", this hook raises for the request.
    """

    example_args: ClassVar[Mapping[str, object]] = {ARGUMENT: "count_up"}

    def __init__(self, context: StepExtensionContext) -> None:
        self._vocab_size = context.vocab_size
        self._last: dict[int, int] = {}
        self._num_computed: dict[int, int] = {}
        self._fails_in: dict[int, str] = {}

    @classmethod
    def check_params(cls, params: SamplingParams) -> None:
        """Raise RequestError unless the argument is "count_up", a hook's name or absent."""
        value = params.extra_args.get(ARGUMENT, "count_up")
        if value != "count_up" and value not in FAIL_IN:
            message = f"extra_args[{ARGUMENT!r}]={value!r} must be 'count_up' or one of {FAIL_IN}."
            raise RequestError(message, parameter=f"extra_args.{ARGUMENT}")

    def join(self, row: int, request: NewRequest) -> bool:
        """Store the last token of the request."""
        self.leave(row)
        value = request.sampling_params.extra_args.get(ARGUMENT)
        if value is None:
            return False
        if value != "count_up":
            self._fails_in[row] = str(value)
        self._fail("join", [row])
        self._last[row] = request.token_ids[-1]
        return True

    def leave(self, row: int) -> None:
        """Delete the last token of the row."""
        for column in (self._last, self._fails_in, self._num_computed):
            column.pop(row, None)

    def before_forward(self, batch: ExtensionBatch) -> None:
        """Store the last position of each row."""
        self._fail("before_forward", batch.rows)
        for row, start, count in zip(batch.rows, batch.starts, batch.num_tokens, strict=True):
            self._num_computed[row] = start + count

    def hidden_states(self, batch: ExtensionBatch, hidden_TD: torch.Tensor) -> torch.Tensor:
        """Return the hidden states unchanged."""
        self._fail("hidden_states", batch.rows)
        assert len(hidden_TD) == sum(batch.num_tokens), (
            "hidden_states() must get one hidden state per token"
        )
        return hidden_TD

    def logits(self, rows: Sequence[int], logits_RV: torch.Tensor) -> torch.Tensor:
        """Increase the logit of the token id (last token + 1) in each row."""
        self._fail("logits", rows)
        for index, row in enumerate(rows):
            logits_RV[index, (self._last[row] + 1) % self._vocab_size] += BONUS
        return logits_RV

    def after_sampling(self, rows: Sequence[int], token_ids_R: torch.Tensor) -> None:
        """Store the sampled tokens as the last tokens."""
        self._fail("after_sampling", rows)
        self._last.update(zip(rows, token_ids_R.tolist(), strict=True))

    def _fail(self, hook: str, rows: Sequence[int]) -> None:
        for row in rows:
            if self._fails_in.get(row) == hook:
                raise ValueError(f"row {row}: requested failure in {hook}")

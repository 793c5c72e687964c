"""The conformance suite of the step extension contract, for any extension.

It runs random requests through the hooks: with other requests, alone, and after a preemption. The
results of a request must be bitwise equal in all cases.
Dimensions: T tokens of the rows, D hidden size, R rows that sample, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.step_extension import (
    ExtensionBatch,
    StepExtension,
    StepExtensionContext,
)
from dovetail.plan import NewRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import checking, expect

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 61
HIDDEN_SIZE = 8
NUM_ROWS = 6
NUM_STEPS = 16
SMALL_ALPHABET = 5
"""Vocabulary size. It is small, so that tokens repeat."""


@checking("step_extension")
def check_step_extension(
    extension_cls: type[StepExtension],
    device: torch.device,
    *,
    model: object = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check an extension against its contract. Raise AssertionError with the violated rule.

    model: the loaded model for the extension's context. options: constructor options.
    """
    context = StepExtensionContext(
        model=model,
        vocab_size=VOCAB_SIZE,
        max_num_seqs=NUM_ROWS,
        max_model_len=1024,
        device=device,
        options=options or {},
    )
    asking = SamplingParams(extra_args=extension_cls.example_args)
    for params in (asking, SamplingParams()):
        expect(extension_cls.check_params(params) is None, "check_params must return None")
    _check_join(extension_cls(context), asking)
    _RowComparison(extension_cls, context, asking).run()


def _new_request(
    row: int, tokens: Sequence[int], num_prompt: int, params: SamplingParams
) -> NewRequest:
    return NewRequest(
        request_id=f"r{row}",
        row=row,
        generation=1,
        token_ids=array("i", tokens),
        num_prompt_tokens=num_prompt,
        sampling_params=params,
        stop_token_ids=frozenset(),
        bad_words_token_ids=(),
        seed=row,
    )


def _check_join(extension: StepExtension, asking: SamplingParams) -> None:
    for row in range(NUM_ROWS):
        extension.leave(row)  # no request has this row
    joined = extension.join(0, _new_request(0, [1, 2, 3], 3, asking))
    expect(
        joined is True, f"join() returns {joined!r} for a request with example_args; expected True"
    )
    joined = extension.join(1, _new_request(1, [1, 2, 3], 3, SamplingParams()))
    expect(
        joined is False,
        f"join() returns {joined!r} for a request without extra_args; expected False",
    )
    extension.leave(0)
    extension.leave(0)


class _RowComparison:
    """Runs several rows in one instance, and compares each row with a new instance."""

    def __init__(
        self,
        extension_cls: type[StepExtension],
        context: StepExtensionContext,
        asking: SamplingParams,
    ) -> None:
        self._cls, self._context, self._asking = extension_cls, context, asking
        self._random = Random(5)
        self._extension = extension_cls(context)
        self._tokens = {
            row: [self._random.randrange(SMALL_ALPHABET) for _ in range(1 + 2 * row)]
            for row in range(NUM_ROWS)
        }
        self._num_prompt = {row: len(tokens) for row, tokens in self._tokens.items()}

    def run(self) -> None:
        """Run the steps."""
        import torch

        with torch.inference_mode():
            for row in self._tokens:
                self._extension.join(row, self._request(row, row))
            for _ in range(NUM_STEPS):
                self._step()

    def _request(self, row: int, owner: int) -> NewRequest:
        return _new_request(row, self._tokens[owner], self._num_prompt[owner], self._asking)

    def _step(self) -> None:
        import torch

        rows = self._random.sample(range(NUM_ROWS), self._random.randint(1, NUM_ROWS))
        hidden_TD, logits_RV = self._numbers(len(rows), HIDDEN_SIZE), self._logits(len(rows))
        together = self._play(self._extension, rows, rows, hidden_TD, logits_RV)
        for index, row in enumerate(rows):
            fresh, other_row = self._cls(self._context), NUM_ROWS - 1 - row
            fresh.join(other_row, self._request(other_row, row))
            part = slice(index, index + 1)
            alone = self._play(fresh, [other_row], [row], hidden_TD[part], logits_RV[part])
            for what, actual, expected in zip(
                ("hidden_states", "logits"), together, alone, strict=True
            ):
                same = torch.equal(actual[part], expected)
                expect(
                    same,
                    f"the result of {what} for a row must not depend on other rows or change after "
                    "a preemption",
                )
        chosen = [self._random.randrange(SMALL_ALPHABET) for _ in rows]
        device = self._context.device
        self._extension.after_sampling(rows, torch.tensor(chosen, device=device))
        for row, token in zip(rows, chosen, strict=True):
            self._tokens[row].append(token)

    def _play(
        self,
        extension: StepExtension,
        rows: Sequence[int],
        owners: Sequence[int],
        hidden_TD: torch.Tensor,
        logits_RV: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden states and logits of a step in which each row has one token."""
        batch = ExtensionBatch(
            rows=rows,
            starts=[len(self._tokens[owner]) - 1 for owner in owners],
            num_tokens=[1] * len(rows),
            samples=[True] * len(rows),
            first_tokens=range(len(rows)),
            total_num_tokens=len(rows),
        )
        extension.before_forward(batch)
        after_TD: Any = extension.hidden_states(batch, hidden_TD.clone())
        after_TD = hidden_TD if after_TD is None else after_TD
        _check_like("hidden_states", after_TD, hidden_TD)
        after_RV = extension.logits(rows, logits_RV.clone())
        _check_like("logits", after_RV, logits_RV)
        _check_logits(logits_RV, after_RV)
        return after_TD, after_RV

    def _numbers(self, *shape: int) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(self._random.randrange(1 << 30))
        return torch.randn(*shape, generator=generator).to(self._context.device)

    def _logits(self, num_rows: int) -> torch.Tensor:
        import torch

        logits_RV = self._numbers(num_rows, VOCAB_SIZE)
        return logits_RV.masked_fill(logits_RV > 1.5, -torch.inf)


def _check_like(what: str, after: Any, before: torch.Tensor) -> None:
    import torch

    expect(
        isinstance(after, torch.Tensor),
        f"{what} returns a {type(after).__name__}; expected a tensor",
    )
    for name in ("shape", "dtype", "device"):
        actual, due = getattr(after, name), getattr(before, name)
        expect(actual == due, f"{what} returns a tensor with the {name} {actual}; expected {due}")


def _check_logits(before_RV: torch.Tensor, after_RV: torch.Tensor) -> None:
    import torch

    expect(not bool(after_RV.isnan().any()), "the method logits() must not return NaN")
    banned = before_RV == -torch.inf
    expect(
        bool((after_RV[banned] == -torch.inf).all()),
        "the method logits() must not change logits of -inf",
    )
    is_masked = (after_RV == -torch.inf).all(-1) & ~banned.all(-1)
    expect(
        not bool(is_masked.any()),
        "the method logits() must leave each row at least one finite logit",
    )

"""The conformance suite of the model contract, for any architecture at a small size.

With the suite's dense attention, a model is compared with itself: causality, prompts in chunks,
several sequences in one step, positions and the final norm (`dovetail_devkit.model.structure`). A
pooling model is compared by the outputs of its head, or by its hidden states; one with
"whole_prompts" runs with bidirectional attention and is not split into chunks. Only a comparison
with another implementation (`reference`) shows whether the model matches its paper. This module
imports torch, so import this module only to test models.

Dimensions: T tokens, V vocabulary, labels or features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any, cast

import torch

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking, expect, expect_error
from dovetail_devkit.model.dense_attention import DenseAttention
from dovetail_devkit.model.structure import (
    FINAL_NORM,
    POSITIONS,
    WatchedOps,
    check_norm,
    lacks,
    position_tables,
    tokens_for_norm,
)

TOLERANCE = 1e-4
NUM_TOKENS = 12
_POSITION_COUNTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Fields of config.json for the number of positions."""

Fill = Callable[[Any], None]
"""A function that loads and packs a model's weights. Each call loads the same weights."""

Reference = Callable[[Any, torch.Tensor], torch.Tensor]
"""Return the logits, [T, V], of the token ids [T] of one prompt. The first argument is the model
with its weights; another implementation may copy the weights by name."""


@checking("model")
def check_model(
    model_cls: type[Any],
    context: ModelContext,
    *,
    fill: Fill,
    tolerance: float = TOLERANCE,
    reference: Reference | None = None,
) -> None:
    """Check an architecture against its contract. Raise AssertionError with the violated rule.

    context: its config.json must describe a small model, and max_model_len must be at least 16.
    fill: loads and packs the weights. tolerance: largest allowed difference between two
    computations of a logit. reference: another implementation, whose logits must be equal, or None.
    """
    cases = model_cases(model_cls, context, fill=fill, tolerance=tolerance, reference=reference)
    for case in cases:
        with suppress(SkipCase):
            case.run()


def model_cases(
    model_cls: type[Any],
    context: ModelContext,
    *,
    fill: Fill,
    tolerance: float = TOLERANCE,
    reference: Reference | None = None,
) -> Iterator[Case]:
    """Yield the suite's cases. The arguments are the same as for `check_model`."""

    @cache
    def make_bench() -> _Bench:
        watched = WatchedOps(context.ops)
        model = model_cls(replace(_with_all_positions(context), ops=cast("Any", watched)))
        fill(model)
        return _Bench(model, context, tolerance, watched)

    def check_filled(check: Callable[[_Bench], None]) -> None:
        with torch.inference_mode():
            check(make_bench())

    yield Case(name="declarations", run=partial(_check_declarations, model_cls))
    yield Case(name="refusals", run=partial(_check_rejections, model_cls, context))
    for name, check in _CHECKS.items():
        yield Case(name=name, run=partial(check_filled, check))
    if reference is not None:
        check = partial(_Bench.check_reference, reference=reference)
        yield Case(name="reference", run=partial(check_filled, check))


def _with_all_positions(context: ModelContext) -> ModelContext:
    """Return the context of a model with max_model_len positions."""
    names = [name for name in _POSITION_COUNTS if name in context.hf_config]
    counts = dict.fromkeys(names, context.max_model_len)
    return replace(context, hf_config={**context.hf_config, **counts})


def _check_declarations(model_cls: type[Any]) -> None:
    names = model_cls.architectures
    valid = isinstance(names, tuple) and all(isinstance(name, str) for name in names)
    expect(valid and bool(names), f"architectures is {names!r}; expected a tuple of str")


def _check_rejections(make: Callable[[ModelContext], Any], context: ModelContext) -> None:
    for value in (None, -1, "many"):
        config = {**context.hf_config, "vocab_size": value}
        if value is None:
            del config["vocab_size"]
        invalid = replace(context, hf_config=config)
        rule = f"the constructor must reject a config.json with vocab_size={value!r}"
        error = expect_error(ModelError, partial(make, invalid), rule)
        expect(
            "vocab_size" in str(error),
            f"the ModelError must name the wrong field vocab_size; its message is: {error}",
        )


class _Bench:
    """A model with loaded weights, and two sequences to run on it."""

    def __init__(
        self, model: Any, context: ModelContext, tolerance: float, ops: WatchedOps
    ) -> None:
        self._model, self._context, self._tolerance = model, context, tolerance
        self._ops = ops
        vocab_size = context.hf_config["vocab_size"]
        generator = torch.Generator().manual_seed(4)
        self._ids = torch.randint(0, vocab_size, (2, NUM_TOKENS), generator=generator)
        self._ids = self._ids.to(context.device)
        self._vocab_size = vocab_size
        self._num_layers = 0
        provides = getattr(model, "provides", ())
        self._pools, self._is_whole = "pooling" in provides, "whole_prompts" in provides

    def _attention(self) -> DenseAttention:
        return DenseAttention(bidirectional=self._is_whole)

    def _results(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Return logits, the outputs of a classification head, or the hidden states: [S, V]."""
        if not self._pools:
            return cast("torch.Tensor", self._model.compute_logits(hidden_SD))
        if self._model.num_labels:
            return cast("torch.Tensor", self._model.classify(hidden_SD))
        return hidden_SD

    @cached_property
    def _alone(self) -> list[torch.Tensor]:
        return [self._logits(self._attention(), [(0, ids, 0)]) for ids in self._ids]

    def check_alone(self) -> None:
        """Check that logits are finite and depend on the tokens."""
        for logits in self._alone:
            expect(bool(logits.isfinite().all()), "compute_logits returns NaN or infinite logits")
        spread = float((self._alone[0][0] - self._alone[0][-1]).abs().max())
        expect(spread > 10 * self._tolerance, "the logits do not depend on the tokens")

    def check_chunks(self) -> None:
        """Compare a sequence in chunks with the whole sequence."""
        if self._is_whole:
            raise SkipCase("the model declares whole_prompts")
        for pieces in ((5, 1, 6), (1,) * NUM_TOKENS):
            attention, parts, start = self._attention(), [], 0
            for count in pieces:
                ids = self._ids[0][start : start + count]
                parts.append(self._logits(attention, [(0, ids, start)]))
                start += count
            how = f"The sequence ran in chunks of {pieces} tokens."
            self._compare(torch.cat(parts), self._alone[0], how)

    def check_neighbors(self) -> None:
        """Compare the logits of two sequences in one step with the logits of separate steps."""
        runs = [(0, self._ids[0], 0), (1, self._ids[1], 0)]
        both = self._logits(self._attention(), runs)
        self._compare(both, torch.cat(self._alone), "Two sequences ran in one step.")

    def check_causality(self) -> None:
        """Check that a token affects its own logits, but not the logits of earlier tokens."""
        alone = self._alone[0]
        changed = self._ids[0].clone()
        changed[-1] = (changed[-1] + 1) % self._vocab_size
        logits = self._logits(self._attention(), [(0, changed, 0)])
        if self._is_whole:
            expect(
                float((logits[0] - alone[0]).abs().max()) > self._tolerance,
                "the first token's result does not depend on the last token, but the model "
                "declares whole_prompts",
            )
        else:
            self._compare(logits[:-1], alone[:-1], "The last token of the sequence was changed.")
        moved = float((logits[-1] - alone[-1]).abs().max())
        expect(moved > self._tolerance, "the logits of the last token do not depend on that token")

    def check_narrowed(self) -> None:
        """Check that the needed tokens get the same logits if the model skips other tokens."""
        attention = self._attention()
        attention.needed = torch.tensor([2, NUM_TOKENS - 1], device=self._context.device)
        attention.begin([(0, NUM_TOKENS)])
        positions_T = torch.arange(NUM_TOKENS, device=self._context.device)
        self._ops.positions = positions_T.clone()
        hidden_SD = self._model.forward(self._ids[0], positions_T, attention)
        if len(hidden_SD) == NUM_TOKENS:
            hidden_SD = attention.narrow(hidden_SD)
        logits_SV = self._results(hidden_SD)
        how = "Only two tokens were needed after the attention of the last layer."
        self._compare(logits_SV, attention.narrow(self._alone[0]), how)

    def check_positions(self) -> None:
        """Check that each position affects the logits."""
        ids, alone = self._ids[0], self._alone[0]
        if lacks(self._model, POSITIONS):
            raise SkipCase("the model declares POSITIONS in `lacks`")
        backwards = torch.arange(NUM_TOKENS - 1, -1, -1)
        logits = self._logits(self._attention(), [(0, ids, 0)], positions=backwards)
        moved = float((logits - alone).abs().max())
        expect(
            moved > self._tolerance,
            "the positions are ignored: reversed positions give the same logits. A model without "
            "positions declares lacks = frozenset({'positions'})",
        )

    def check_all_positions(self) -> None:
        """Check that the first and last position run, and read the first and last table row."""
        limit = self._context.max_model_len
        limit = min(limit, getattr(self._model, "max_positions", None) or limit)
        ends = (0, limit - 1)
        with checking(f"The positions 0 and {limit - 1} must run with max_model_len={limit}."):
            before = [self._at(position) for position in ends]
        for name, table in position_tables(self._model, limit, self._vocab_size).items():
            for position, logits in zip(ends, before, strict=True):
                kept = table[position].clone()
                table[position] += 1.0 + torch.arange(len(kept), device=kept.device) % 3
                moved = float((self._at(position) - logits).abs().max())
                table[position] = kept
                expect(
                    moved > self._tolerance,
                    f"row {position} of {name} is not read at position {position}; another row is "
                    "read instead",
                )

    def check_final_norm(self) -> None:
        """Check that the model applies a final norm to the hidden states."""
        if lacks(self._model, FINAL_NORM):
            raise SkipCase("the model declares FINAL_NORM in `lacks`")
        if self._context.dtype != torch.float32:
            raise SkipCase(f"this check needs float32, but the model uses {self._context.dtype}")
        (first,) = self._hidden([(9, self._ids[0][:1], 0)])
        num_tokens, limit = tokens_for_norm(len(first)), self._context.max_model_len
        generator = torch.Generator().manual_seed(6)
        runs = []
        for sequence in range(-(-num_tokens // limit)):
            ids = torch.randint(0, self._vocab_size, (limit,), generator=generator)
            runs.append((sequence, ids.to(self._context.device), 0))
        check_norm(self._hidden(runs))

    def check_reference(self, reference: Reference) -> None:
        """Compare the logits with the logits of another implementation."""
        for ids, logits in zip(self._ids, self._alone, strict=True):
            expected = reference(self._model, ids).to(logits.device)
            self._compare(logits, expected, "The expected logits are those of the reference.")

    def _at(self, position: int) -> torch.Tensor:
        """Return the logits of one token at a position, without earlier tokens."""
        return self._logits(self._attention(), [(0, self._ids[0][:1], position)])

    def _hidden(self, runs: Sequence[tuple[int, torch.Tensor, int]]) -> torch.Tensor:
        """Return the hidden states of a step, [T, D]."""
        attention = self._attention()
        attention.begin([(sequence, len(ids)) for sequence, ids, _ in runs])
        positions = [torch.arange(start, start + len(ids)) for _, ids, start in runs]
        positions_T = torch.cat(positions).to(self._context.device)
        self._ops.positions = positions_T
        hidden_TD: torch.Tensor = self._model.forward(
            torch.cat([ids for _, ids, _ in runs]), positions_T, attention
        )
        return hidden_TD

    def _logits(
        self,
        attention: DenseAttention,
        runs: Sequence[tuple[int, torch.Tensor, int]],
        *,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of a step, [T, V]. runs: (sequence, ids, first position).

        positions: the positions of all tokens, if they do not follow from `runs`.
        """
        attention.begin([(sequence, len(ids)) for sequence, ids, _ in runs])
        input_ids_T = torch.cat([ids for _, ids, _ in runs])
        counted = [torch.arange(start, start + len(ids)) for _, ids, start in runs]
        positions_T = torch.cat(counted) if positions is None else positions
        positions_T = positions_T.to(self._context.device)
        self._ops.positions = positions_T.clone()
        before = input_ids_T.clone(), positions_T.clone()
        hidden_TD = self._model.forward(input_ids_T, positions_T, attention)
        same = torch.equal(input_ids_T, before[0]) and torch.equal(positions_T, before[1])
        expect(same, "forward must not change its inputs")
        num_tokens = len(input_ids_T)
        expect(
            hidden_TD.ndim == 2 and len(hidden_TD) == num_tokens,
            f"forward returns the shape {list(hidden_TD.shape)} for {num_tokens} tokens; expected "
            "[T, D]",
        )
        expect(
            hidden_TD.dtype == self._context.dtype,
            f"forward returns {hidden_TD.dtype}; expected {self._context.dtype}",
        )
        self._check_calls(attention.calls)
        logits_TV = self._results(hidden_TD)
        width = hidden_TD.shape[1] if self._pools else self._vocab_size
        width = (self._pools and self._model.num_labels) or width
        expect(
            tuple(logits_TV.shape) == (num_tokens, width),
            f"the model's head returns the shape {list(logits_TV.shape)}; expected "
            f"{[num_tokens, width]}",
        )
        last = self._results(hidden_TD[-1:])
        self._compare(last, logits_TV[-1:], "compute_logits got only the last hidden state.")
        return logits_TV.float()

    def _check_calls(self, calls: list[int]) -> None:
        self._num_layers = self._num_layers or len(calls)
        expected = list(range(self._num_layers))
        expect(
            calls == expected and bool(calls),
            f"the model calls attention for the layers {calls}; expected {expected}",
        )

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor, how: str) -> None:
        off = float((actual.float() - expected.float()).abs().max())
        expect(
            off <= self._tolerance,
            f"the logits differ by {off}, but the tolerance is {self._tolerance}. {how}",
        )


_CHECKS: Mapping[str, Callable[[_Bench], None]] = {
    "alone": _Bench.check_alone,
    "in chunks": _Bench.check_chunks,
    "two sequences": _Bench.check_neighbors,
    "causality": _Bench.check_causality,
    "narrowed": _Bench.check_narrowed,
    "positions": _Bench.check_positions,
    "all positions": _Bench.check_all_positions,
    "final norm": _Bench.check_final_norm,
}

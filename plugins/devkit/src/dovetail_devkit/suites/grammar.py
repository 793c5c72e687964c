"""The conformance suite of the grammar contract, for any backend.

It walks through the backend's examples at random, using only the bit masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from dovetail.errors import RequestError
from dovetail.interfaces.grammar import (
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarSpec,
)
from dovetail.interfaces.tokenizer import Tokenizer
from dovetail_devkit.expectation import expect, judging
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

NUM_WALKS = 8
MAX_STEPS = 64


@judging("in the grammar suite")
def check_grammar(
    backend_cls: type[GrammarBackend],
    *,
    tokenizer: Tokenizer | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a backend against its contract; raise AssertionError with the violated rule.

    tokenizer: None for a tokenizer of bytes. options: constructor options of the backend.
    """
    tokenizer = tokenizer or ByteTokenizer()
    end = tokenizer.eos_token_id
    expect(end is not None, "the suite needs a tokenizer with an EOS token")
    context = GrammarContext(
        tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, options=options or {}
    )
    examples = backend_cls.examples
    expect(bool(examples), "examples is empty; give a text for the forms that requests use")
    expect(examples.keys() <= backend_cls.forms, "examples has forms that are not in `forms`")
    backend = backend_cls(context)
    for form, text in examples.items():
        given = GrammarSpec(form=form, text=text, stop_token_ids=frozenset({end or 0}))
        for seed in range(NUM_WALKS):
            _Walk(backend, given, tokenizer.vocab_size, Random(seed)).run()
    _check_refusal(backend, end or 0)


def _check_refusal(backend: GrammarBackend, end: int) -> None:
    given = GrammarSpec(form="no such form", text="x", stop_token_ids=frozenset({end}))
    try:
        backend.compile(given)
    except RequestError:
        return
    expect(False, "compile accepts an unknown form; it must raise RequestError")


class _Walk:
    """Walk one matcher from the start to an end."""

    def __init__(
        self, backend: GrammarBackend, given: GrammarSpec, vocab_size: int, random: Random
    ) -> None:
        self._matcher, self._other = backend.compile(given), backend.compile(given)
        self._ends = given.stop_token_ids
        self._vocab_size = vocab_size
        self._random = random

    def run(self) -> None:
        """Walk; the other matcher stays at the start."""
        first = self._allowed(self._other)
        for _ in range(MAX_STEPS):
            allowed = self._allowed(self._matcher)
            if self._matcher.is_finished():
                expect(allowed <= self._ends, "a finished grammar allows more than stop tokens")
                break
            going_on = sorted(allowed - self._ends)
            if not going_on:
                break
            self._check_forbidden(allowed)
            token = self._random.choice(going_on)
            expect(self._matcher.accept([token]) == 1, "accept refuses an allowed token")
            self._check_rollback(token, allowed)
        expect(self._allowed(self._other) == first, "two matchers of one text are not independent")

    def _check_forbidden(self, allowed: set[int]) -> None:
        forbidden = sorted(set(range(self._vocab_size)) - allowed)
        if forbidden:
            token = self._random.choice(forbidden)
            expect(self._matcher.accept([token]) == 0, "accept accepts a token that is not allowed")
            same = self._allowed(self._matcher) == allowed
            expect(same, "a refused token changes the allowed tokens")

    def _check_rollback(self, token: int, before: set[int]) -> None:
        after = self._allowed(self._matcher)
        self._matcher.rollback(1)
        expect(
            self._allowed(self._matcher) == before, "rollback does not restore the allowed tokens"
        )
        self._matcher.accept([token])
        expect(
            self._allowed(self._matcher) == after,
            "the same token leads to other allowed tokens after rollback",
        )

    def _allowed(self, matcher: GrammarMatcher) -> set[int]:
        words = bytearray(4 * ((self._vocab_size + 31) // 32))
        matcher.fill_bitmask(memoryview(words))
        allowed = {t for t in range(8 * len(words)) if words[t // 8] >> t % 8 & 1}
        expect(bool(allowed), "fill_bitmask allows no token")
        expect(max(allowed) < self._vocab_size, "fill_bitmask allows ids beyond the vocabulary")
        return allowed

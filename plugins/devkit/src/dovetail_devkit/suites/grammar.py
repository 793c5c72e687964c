"""The conformance suite of the grammar contract, for any backend.

For each example grammar of the backend, the suite generates random strings by sampling only tokens
that the bitmask allows.
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
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.fakes.tokenizer import ByteTokenizer

NUM_WALKS = 8
MAX_STEPS = 64


@checking("grammar")
def check_grammar(
    backend_cls: type[GrammarBackend],
    *,
    tokenizer: Tokenizer | None = None,
    options: Mapping[str, object] | None = None,
) -> None:
    """Check a backend against its contract. Raise AssertionError with the violated rule.

    tokenizer: None for a tokenizer of bytes. options: constructor options of the backend.
    """
    tokenizer = tokenizer or ByteTokenizer()
    end = tokenizer.eos_token_id
    expect(end is not None, "the tokenizer of the suite must have an EOS token")
    context = GrammarContext(
        tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, options=options or {}
    )
    examples = backend_cls.examples
    expect(bool(examples), "the attribute `examples` is empty; add a grammar for at least one form")
    expect(
        examples.keys() <= backend_cls.forms,
        f"the attribute `examples` has the forms {sorted(examples)}, but the backend declares "
        f"{sorted(backend_cls.forms)}",
    )
    backend = backend_cls(context)
    for form, text in examples.items():
        spec = GrammarSpec(form=form, text=text, stop_token_ids=frozenset({end or 0}))
        for seed in range(NUM_WALKS):
            _RandomText(backend, spec, tokenizer.vocab_size, Random(seed)).run()
    _check_rejection(backend, end or 0)


def _check_rejection(backend: GrammarBackend, end: int) -> None:
    spec = GrammarSpec(form="unknown", text="x", stop_token_ids=frozenset({end}))
    try:
        backend.compile(spec)
    except RequestError:
        return
    expect(False, "compile must raise RequestError for a form that is not in `forms`")


class _RandomText:
    """Generates a random text: samples tokens that one matcher allows."""

    def __init__(
        self, backend: GrammarBackend, spec: GrammarSpec, vocab_size: int, random: Random
    ) -> None:
        self._matcher, self._other = backend.compile(spec), backend.compile(spec)
        self._ends = spec.stop_token_ids
        self._vocab_size = vocab_size
        self._random = random

    def run(self) -> None:
        """Accept tokens and check each step.

        A second matcher, which accepts no tokens, must not change.
        """
        first = self._allowed(self._other)
        for _ in range(MAX_STEPS):
            allowed = self._allowed(self._matcher)
            if self._matcher.is_finished():
                expect(allowed <= self._ends, "a finished matcher must allow only stop tokens")
                break
            going_on = sorted(allowed - self._ends)
            if not going_on:
                break
            self._check_forbidden(allowed)
            token = self._random.choice(going_on)
            expect(self._matcher.accept([token]) == 1, "accept must return 1 for one allowed token")
            self._check_rollback(token, allowed)
        expect(
            self._allowed(self._other) == first,
            "two matchers of the same grammar must not affect each other",
        )

    def _check_forbidden(self, allowed: set[int]) -> None:
        forbidden = sorted(set(range(self._vocab_size)) - allowed)
        if forbidden:
            token = self._random.choice(forbidden)
            expect(
                self._matcher.accept([token]) == 0,
                "accept must return 0 for one token that is not allowed",
            )
            same = self._allowed(self._matcher) == allowed
            expect(same, "accept of a token that is not allowed must not change the matcher")

    def _check_rollback(self, token: int, before: set[int]) -> None:
        after = self._allowed(self._matcher)
        self._matcher.rollback(1)
        expect(
            self._allowed(self._matcher) == before,
            "rollback must restore the tokens that were allowed before",
        )
        self._matcher.accept([token])
        expect(
            self._allowed(self._matcher) == after,
            "accept after rollback must allow the same tokens as before rollback",
        )

    def _allowed(self, matcher: GrammarMatcher) -> set[int]:
        words = bytearray(4 * ((self._vocab_size + 31) // 32))
        matcher.fill_bitmask(memoryview(words))
        allowed = {t for t in range(8 * len(words)) if words[t // 8] >> t % 8 & 1}
        expect(bool(allowed), "fill_bitmask must allow at least one token")
        expect(
            max(allowed) < self._vocab_size,
            f"fill_bitmask allows the id {max(allowed)}, but vocab_size is {self._vocab_size}",
        )
        return allowed

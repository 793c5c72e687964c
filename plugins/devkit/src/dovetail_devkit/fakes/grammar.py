"""A fake grammar backend: a grammar lists the allowed token ids at each position.

With `form="token_ids"`, the text "5|6 7" allows 5 or 6, then 7, then a stop token. This module does
not depend on a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.grammar import (
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarSpec,
)

FAIL_IN = ("compile", "fill_bitmask", "accept", "allow_nothing")


class FakeMatcher:
    """Tracks the position of one request in its grammar."""

    def __init__(self, positions: Sequence[frozenset[int]], ends: frozenset[int]) -> None:
        self._positions = positions
        self._ends = ends
        self._place = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first forbidden token. Return the number of accepted tokens."""
        for count, token in enumerate(token_ids):
            if token not in self._allowed():
                return count
            self._place += 1
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` tokens."""
        self._place -= num_tokens

    def fill_bitmask(self, words: memoryview) -> None:
        """Set the bits of the tokens that are allowed next."""
        for token in self._allowed():
            words[token // 8] |= 1 << token % 8

    def is_finished(self) -> bool:
        """Return whether every position has a token."""
        return self._place >= len(self._positions)

    def _allowed(self) -> frozenset[int]:
        return self._ends if self.is_finished() else self._positions[self._place]


class FailingMatcher(FakeMatcher):
    """A matcher that fails at the second token, in the given method."""

    def __init__(self, where: str, token: int, ends: frozenset[int]) -> None:
        super().__init__([frozenset({token})] * 8, ends)
        self._where = where

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance by the tokens, or raise if this is the method that must fail."""
        self._fail("accept")
        return super().accept(token_ids)

    def fill_bitmask(self, words: memoryview) -> None:
        """Allow one token. If this is the method that must fail, raise or allow no token."""
        if self._place:
            self._fail("fill_bitmask")
        if not (self._place and self._where == "allow_nothing"):
            super().fill_bitmask(words)

    def _fail(self, method: str) -> None:
        if self._where == method:
            raise ValueError(f"requested failure in {method}")


class FakeGrammar(GrammarBackend):
    """Compiles grammars of the form "token_ids".

    In the form "failing", the text is the name of a method that fails.
    """

    forms: ClassVar[frozenset[str]] = frozenset({"token_ids", "failing"})
    examples: ClassVar[Mapping[str, str]] = {"token_ids": "5|6 7 8|9|10"}

    def __init__(self, context: GrammarContext) -> None:
        self._vocab_size = context.vocab_size

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a matcher. Raise RequestError if the text is not a list of token ids."""
        if spec.form == "failing":
            if spec.text == "compile":
                raise ValueError("requested failure in compile")
            return FailingMatcher(spec.text, 5, spec.stop_token_ids)
        try:
            positions = [frozenset(map(int, item.split("|"))) for item in spec.text.split()]
        except ValueError:
            positions = []
        known = range(self._vocab_size)
        if not positions or not all(token in known for position in positions for token in position):
            raise RequestError(
                f"text={spec.text!r:.80} must list token ids below {self._vocab_size}, such as "
                "'5|6 7'.",
                parameter="structured_outputs.text",
            )
        return FakeMatcher(positions, spec.stop_token_ids)

"""Applies a grammar only after the reasoning of a request, and limits the reasoning.

This module does not depend on a grammar plugin. Markers are found by decoding the last tokens,
because a marker can be one special token, several tokens, or the beginning of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from dovetail.interfaces import GrammarMatcher, Tokenizer
from dovetail.sampling_params import ReasoningParams


class Phase(Enum):
    """The phases of a request's output, if the model may reason before it answers."""

    OPENING = "before the first token, which may begin the reasoning"
    REASONING = "in the reasoning"
    ENDING = "the limit is reached: the marker that ends the reasoning is forced"
    ANSWER = "after the reasoning"


class ReasoningMatcher:
    """The matcher of a request that reasons before its answer.

    answer: the matcher of the answer; None for an answer without a grammar.
    """

    def __init__(
        self, matcher: GrammarMatcher | None, params: ReasoningParams, tokenizer: Tokenizer
    ) -> None:
        self.answer = matcher
        self._params = params
        self._tokenizer = tokenizer
        self._start_ids = tokenizer.encode(params.start, add_special_tokens=False)
        self._end_ids = tokenizer.encode(params.end, add_special_tokens=False)
        self._num_kept = len(params.end) + 4  # a token of the marker has at least one character
        self._tokens: list[int] = []
        self._phases: list[Phase] = []  # before each token of `_tokens`
        self._num_reasoning = self._num_forced = 0
        self._phase = self._first_phase()

    @property
    def masks(self) -> bool:
        """Whether the next token is constrained."""
        if self._phase is Phase.REASONING:
            return False
        return self._phase is Phase.ENDING or self.answer is not None

    @property
    def in_answer(self) -> bool:
        """Whether the answer has started."""
        return self._phase is Phase.ANSWER

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first one that is not allowed. Return their number."""
        for count, token in enumerate(token_ids):
            phase = self._next_phase(token)
            if phase is None:
                return count
            self._tokens.append(token)
            self._phases.append(self._phase)
            self._count(1)
            self._phase = phase
            self._check_end()
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        for _ in range(num_tokens):
            self._tokens.pop()
            before = self._phases.pop()
            is_answer = before is Phase.ANSWER or (before is Phase.OPENING and self.in_answer)
            if is_answer and self.answer is not None:
                self.answer.rollback(1)
            self._phase = before
            self._count(-1)

    def fill_bitmask(self, words: memoryview) -> None:
        """Set the bit of each allowed token to 1."""
        if self._phase is Phase.ENDING:
            _allow(words, self._end_ids[self._num_forced])
            return
        if self.answer is not None and self._phase is not Phase.REASONING:
            self.answer.fill_bitmask(words)
            if self._phase is Phase.OPENING and self._start_ids:
                _allow(words, self._start_ids[0])
            return
        words[:] = b"\xff" * words.nbytes

    def is_finished(self) -> bool:
        """Return whether only stop tokens are allowed."""
        return self.in_answer and self.answer is not None and self.answer.is_finished()

    def _first_phase(self) -> Phase:
        if self._params.start:
            return Phase.OPENING
        return Phase.ENDING if self._params.budget == 0 else Phase.REASONING

    def _next_phase(self, token: int) -> Phase | None:
        """Return the phase after a token, or None if the token is not allowed."""
        if self._phase is Phase.OPENING and self._start_ids[:1] == [token]:
            return Phase.ENDING if self._params.budget == 0 else Phase.REASONING
        if self._phase in (Phase.OPENING, Phase.ANSWER):
            allowed = self.answer is None or self.answer.accept([token]) == 1
            return Phase.ANSWER if allowed else None
        if self._phase is Phase.ENDING:
            return Phase.ENDING if token == self._end_ids[self._num_forced] else None
        budget = self._params.budget
        is_spent = budget is not None and self._num_reasoning + 1 >= budget
        return Phase.ENDING if is_spent else Phase.REASONING

    def _count(self, change: int) -> None:
        """Add a token to the count of the current phase, or subtract it."""
        self._num_reasoning += change * (self._phase is Phase.REASONING)
        self._num_forced += change * (self._phase is Phase.ENDING)

    def _check_end(self) -> None:
        """Begin the answer if the marker that ends the reasoning is complete."""
        if self._phase is Phase.ENDING and self._num_forced == len(self._end_ids):
            self._phase = Phase.ANSWER
        elif self._phase in (Phase.REASONING, Phase.ENDING) and not self._num_forced:
            text = self._tokenizer.decode(self._tokens[-self._num_kept :])
            if self._params.end in text:
                self._phase = Phase.ANSWER


def _allow(words: memoryview, token: int) -> None:
    words[token // 8] = words[token // 8] | 1 << token % 8

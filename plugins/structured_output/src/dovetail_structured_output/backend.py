"""The `llguidance` grammar plugin: compiles grammars and computes masks with that library.

The library and the vocabulary are loaded with the first grammar, so that an engine starts fast.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces import GrammarBackend, GrammarContext, GrammarMatcher, GrammarSpec

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from dovetail_structured_output.vocabulary import Vocabulary

MAX_CACHED = 256
"""Maximum number of cached compiled grammars."""

_LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


class Matcher:
    """The position of one request in its grammar.

    Tokens that end the text are not passed to llguidance, which would not count some of them.
    """

    def __init__(self, compiled: LLMatcher, ends: frozenset[int]) -> None:
        self.inner = compiled
        self._ends = ends
        self._num_ends = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first one that is not allowed. Return their number."""
        for count, token in enumerate(token_ids):
            if token in self._ends and (self._num_ends or self.inner.is_accepting()):
                self._num_ends += 1
            elif self._num_ends or self.inner.try_consume_tokens([token]) != 1:
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ends = min(self._num_ends, num_tokens)
        self._num_ends -= ends
        if num_tokens > ends and not self.inner.rollback(num_tokens - ends):
            raise ValueError(f"llguidance cannot undo {num_tokens} tokens")

    def fill_bitmask(self, words: memoryview) -> None:
        """Set the bit of each allowed token to 1."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(words))
        if not self.is_finished():
            self.inner.unsafe_compute_mask_ptr(address, words.nbytes)
        self.complete(words)

    def complete(self, words: memoryview) -> None:
        """Set the bits of the tokens that end the text, after a mask was computed."""
        if self.inner.is_error():
            raise ValueError(self.inner.get_error()[:200])
        ends = bool(self._num_ends) or self.inner.is_accepting()
        for token in self._ends:
            if token // 8 < words.nbytes:
                bit = 1 << token % 8
                words[token // 8] = words[token // 8] | bit if ends else words[token // 8] & ~bit

    def is_finished(self) -> bool:
        """Return whether only stop tokens are allowed."""
        return bool(self._num_ends) or (self.inner.is_stopped() and not self.inner.is_error())


def _reason(report: str) -> str:
    """Return the cause in a report of llguidance, whose further lines quote the grammar."""
    first, *others = report.split("\n")
    if first.endswith(":"):  # the cause of an invalid regular expression is in a line of its own
        first += "".join(line.removeprefix("error:") for line in others if "error:" in line)
    return first[:500]


class LLGuidance(GrammarBackend):
    """Compiles grammars with llguidance. The vocabulary is prepared with the first grammar."""

    forms: ClassVar[frozenset[str]] = frozenset(
        {"json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"}
    )
    examples: ClassVar[Mapping[str, str]] = {
        "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        "json_object": "{}",
        "regex": "[0-9]{2}-[a-c]+",
        "choice": '["yes", "no"]',
        "grammar": 'start: "a" ("b" | "c")+',
        "structural_tag": (
            '{"triggers": ["<f"], "structures": '
            '[{"begin": "<f=add>", "schema": {"type": "object"}, "end": "</f>"}]}'
        ),
    }

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._vocabulary: Vocabulary | None = None
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._executor: LLExecutor | None = None

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a new matcher. Raise RequestError if the text is not a valid grammar."""
        if spec.form not in self.forms:
            raise RequestError(
                f"the form {spec.form[:40]!r} is not one of {', '.join(sorted(self.forms))}.",
                parameter="structured_outputs.form",
            )
        known = self.find(spec)
        if known is not None:
            return known
        from llguidance import LLMatcher, LLParserLimits

        from dovetail_structured_output.forms import FORMS

        vocabulary = self._prepare()
        try:
            source = FORMS[spec.form](spec.text, vocabulary.special)
        except ValueError as error:
            raise RequestError(f"{error}.", parameter="structured_outputs") from None
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(vocabulary.compiled, source, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that is too complex fails here, not in a step
        if matcher.is_error():
            raise RequestError(
                f"the {spec.form} is not supported: {_reason(matcher.get_error())}.",
                parameter="structured_outputs",
            )
        with self._lock:
            self._compiled[spec.form, spec.text] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return Matcher(matcher.deep_copy(), spec.stop_token_ids)

    def find(self, spec: GrammarSpec) -> GrammarMatcher | None:
        """Return a new matcher of a grammar that is already compiled, or None."""
        with self._lock:
            matcher = self._compiled.get((spec.form, spec.text))
            if matcher is None:
                return None
            self._compiled.move_to_end((spec.form, spec.text))
        return Matcher(matcher.deep_copy(), spec.stop_token_ids)

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], words: memoryview) -> None:
        """Fill the masks of several requests, in parallel."""
        row_bytes = words.nbytes // len(matchers)
        own = [matcher for matcher in matchers if isinstance(matcher, Matcher)]
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=2)
        rows = [(item.inner, row) for row, item in enumerate(own) if not item.is_finished()]
        address = ctypes.addressof(ctypes.c_char.from_buffer(words))
        if rows:
            self._executor.unsafe_compute_mask_ptr(rows, address, row_bytes, len(own))
        for row, item in enumerate(own):
            item.complete(words[row * row_bytes : (row + 1) * row_bytes])

    def _prepare(self) -> Vocabulary:
        tokenizer = self._context.tokenizer
        if tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer; start the engine without "
                "skip_tokenizer_init.",
                parameter="structured_outputs",
            )
        from dovetail_structured_output.vocabulary import Vocabulary

        with self._preparing:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(tokenizer, self._context.vocab_size)
            return self._vocabulary

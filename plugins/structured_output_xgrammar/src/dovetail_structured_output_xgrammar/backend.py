"""The `xgrammar` grammar plugin: compiles grammars and computes masks with that library.

The library and the vocabulary are loaded with the first grammar, because the library imports torch.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces import GrammarBackend, GrammarContext, GrammarMatcher, GrammarSpec
from dovetail_structured_output_xgrammar.probe import MISSING, probe

if TYPE_CHECKING:
    import xgrammar

    from dovetail_structured_output_xgrammar.vocabulary import Vocabulary

MAX_CACHED = 256
"""Maximum number of cached compiled grammars."""
MAX_CACHED_BYTES = 256 << 20
MAX_GRAMMAR_BYTES = 64 << 20
_JSON = frozenset({"json_schema", "json_object"})
MAX_STEP_S = 0.5
"""Maximum CPU time of one matcher call, in seconds. Ambiguous grammars get slower over time."""


class Matcher:
    """The position of one request in its grammar.

    Tokens that end the text are not passed to xgrammar, whose matcher would accept nothing more.
    """

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, ends: frozenset[int], vocabulary: Vocabulary
    ) -> None:
        from xgrammar import GrammarMatcher as LibraryMatcher

        self._ends = frozenset(end for end in ends if 0 <= end < vocabulary.vocab_size)
        stops = sorted(self._ends) or None
        self.inner = LibraryMatcher(compiled, override_stop_tokens=stops)
        self._usable = vocabulary.usable
        self._num_ends = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first one that is not allowed. Return their number."""
        with _limited():
            for count, token in enumerate(token_ids):
                if not self._accept(token):
                    return count
            return len(token_ids)

    def _accept(self, token: int) -> bool:
        if token in self._ends:
            ends = bool(self._num_ends) or self.inner.is_completed()
            self._num_ends += ends
            return ends
        if self._num_ends or not 0 <= token < len(self._usable) or not self._usable[token]:
            return False
        return bool(self.inner.accept_token(token))

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ends = min(self._num_ends, num_tokens)
        self._num_ends -= ends
        if num_tokens > ends:
            self.inner.rollback(num_tokens - ends)

    def fill_bitmask(self, words: memoryview) -> None:
        """Set the bit of each allowed token to 1."""
        import numpy as np

        if not self._num_ends:
            mask = np.frombuffer(words, dtype=np.int32).reshape(1, -1)
            with _limited():
                self.inner.fill_next_token_bitmask(mask)
            if extra := len(self._usable) % 32:
                mask[0, -1] &= (1 << extra) - 1
        ends = bool(self._num_ends) or self.inner.is_completed()
        for token in self._ends:
            bit = 1 << token % 8
            words[token // 8] = words[token // 8] | bit if ends else words[token // 8] & ~bit

    def is_finished(self) -> bool:
        """Return whether only stop tokens are allowed."""
        if self._num_ends or not self.inner.is_completed():
            return bool(self._num_ends)
        words = bytearray(4 * ((len(self._usable) + 31) // 32))
        self.fill_bitmask(memoryview(words))
        for token in self._ends:
            words[token // 8] &= ~(1 << token % 8)
        return not any(words)


class XGrammar(GrammarBackend):
    """Compiles grammars with xgrammar. The vocabulary is prepared with the first grammar."""

    forms: ClassVar[frozenset[str]] = frozenset(
        {"json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"}
    )
    examples: ClassVar[Mapping[str, str]] = {
        "json_schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}',
        "json_object": "{}",
        "regex": "[0-9]{2}-[a-c]+",
        "choice": '["yes", "no"]',
        "grammar": 'root ::= "a" ("b" | "c")+',
        "structural_tag": (
            '{"triggers": ["<f"], "structures": '
            '[{"begin": "<f=add>", "schema": {"type": "object"}, "end": "</f>"}]}'
        ),
    }

    def __init__(self, context: GrammarContext) -> None:
        self._context = context
        self._vocabulary: Vocabulary | None = None
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], xgrammar.CompiledGrammar] = OrderedDict()
        self._num_bytes = 0

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
        vocabulary = self._prepare()
        try:
            compiled = _compile(spec, vocabulary)
            matcher = Matcher(compiled, spec.stop_token_ids, vocabulary)
            words = bytearray(4 * ((vocabulary.vocab_size + 31) // 32))
            matcher.fill_bitmask(memoryview(words))
            if not any(words) or (spec.form in _JSON and matcher.inner.is_completed()):
                raise ValueError("it matches no string")
        except Exception as error:
            raise RequestError(
                f"the {spec.form} is not supported: {_reason(error)}.",
                parameter="structured_outputs",
            ) from None
        self._keep((spec.form, spec.text), compiled)
        return matcher

    def find(self, spec: GrammarSpec) -> GrammarMatcher | None:
        """Return a new matcher of a grammar that is already compiled, or None."""
        with self._lock:
            compiled = self._compiled.get((spec.form, spec.text))
            if compiled is None or self._vocabulary is None:
                return None
            self._compiled.move_to_end((spec.form, spec.text))
        return Matcher(compiled, spec.stop_token_ids, self._vocabulary)

    def _keep(self, key: tuple[str, str], compiled: xgrammar.CompiledGrammar) -> None:
        with self._lock:
            replaced = self._compiled.pop(key, None)
            self._num_bytes -= 0 if replaced is None else replaced.memory_size_bytes
            self._compiled[key] = compiled
            self._num_bytes += compiled.memory_size_bytes
            while len(self._compiled) > MAX_CACHED or self._num_bytes > MAX_CACHED_BYTES:
                self._num_bytes -= self._compiled.popitem(last=False)[1].memory_size_bytes

    def _prepare(self) -> Vocabulary:
        tokenizer = self._context.tokenizer
        if tokenizer is None:
            raise RequestError(
                "structured_outputs needs a tokenizer; start the engine without "
                "skip_tokenizer_init.",
                parameter="structured_outputs",
            )
        if not probe().usable:
            raise RequestError(MISSING, parameter="structured_outputs")
        with self._preparing:
            if self._vocabulary is None:
                from dovetail_structured_output_xgrammar.vocabulary import Vocabulary

                self._vocabulary = Vocabulary(tokenizer, self._context.vocab_size)
            return self._vocabulary


def _compile(spec: GrammarSpec, vocabulary: Vocabulary) -> xgrammar.CompiledGrammar:
    from dovetail_structured_output_xgrammar.forms import FORMS, MAX_CHARS

    if len(spec.text) > MAX_CHARS:
        raise ValueError(f"it has more than {MAX_CHARS} characters")
    compiled = FORMS[spec.form](vocabulary.compiler, spec.text, vocabulary.special)
    if compiled.memory_size_bytes > MAX_GRAMMAR_BYTES:
        raise ValueError("it is too large after compilation")
    return compiled


def _reason(error: Exception) -> str:
    """Return the message of an exception. The library's messages start with a timestamp."""
    text = " ".join(str(error).split())
    if not isinstance(error, ValueError):
        text = text.rpartition("is false: ")[2].partition("/cpp/")[2].partition(": ")[2] or text
    return text[:500].rstrip(".") or type(error).__name__


@contextmanager
def _limited() -> Iterator[None]:
    """Raise ValueError if the body needed more CPU time than a step may take."""
    begin_s = time.thread_time()
    yield
    if time.thread_time() - begin_s > MAX_STEP_S:
        raise ValueError("the grammar is too ambiguous: a step took too long")

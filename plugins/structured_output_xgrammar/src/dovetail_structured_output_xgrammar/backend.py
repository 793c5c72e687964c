"""The grammar plugin `xgrammar`. Library and vocabulary are loaded with the first grammar."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces import (
    GrammarBackend,
    GrammarContext,
    GrammarMatcher,
    GrammarSpec,
    Tokenizer,
)

if TYPE_CHECKING:
    import xgrammar

    from dovetail.interfaces.tokenizer import TokenPieces

MAX_CACHED = 256
"""Maximum number of compiled grammars that are kept."""


class Matcher:
    """The position of one request in its grammar.

    Tokens that end the text are not passed to xgrammar, whose matcher would accept nothing more.
    """

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, ends: frozenset[int], vocab_size: int
    ) -> None:
        from xgrammar import GrammarMatcher as LibraryMatcher

        self.inner = LibraryMatcher(compiled, override_stop_tokens=sorted(ends))
        self._ends = ends
        self._last_bits = vocab_size % 32  # the number of tokens in the last word; 0 for all
        self._num_ends = 0

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the first one that is not allowed; return their number."""
        for count, token in enumerate(token_ids):
            if token in self._ends and (self._num_ends or self.inner.is_completed()):
                self._num_ends += 1
            elif token in self._ends or self._num_ends or not self.inner.accept_token(token):
                return count
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        ends = min(self._num_ends, num_tokens)
        self._num_ends -= ends
        if num_tokens > ends:
            self.inner.rollback(num_tokens - ends)

    def fill_bitmask(self, words: memoryview) -> None:
        """Set bit 1 for each allowed token."""
        import numpy as np

        if not self._num_ends:
            mask = np.frombuffer(words, dtype=np.int32)
            self.inner.fill_next_token_bitmask(mask.reshape(1, -1))
            if self._last_bits:
                mask[-1] &= (1 << self._last_bits) - 1
            return
        for token in self._ends:
            if token // 8 < words.nbytes:
                words[token // 8] = words[token // 8] | 1 << token % 8

    def is_finished(self) -> bool:
        """Return whether only stop tokens are allowed."""
        return bool(self._num_ends)


class XGrammar(GrammarBackend):
    """Compiles grammars with xgrammar."""

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
        self._lock, self._preparing = threading.Lock(), threading.Lock()
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._compiler: xgrammar.GrammarCompiler | None = None

    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a new matcher; raise RequestError if the text is not a valid grammar."""
        if spec.form not in self.forms:
            raise RequestError(
                f"the form {spec.form[:40]!r} is not one of {', '.join(sorted(self.forms))}.",
                parameter="structured_outputs.form",
            )
        known = self.find(spec)
        if known is not None:
            return known
        compiler = self._prepare()
        from dovetail_structured_output_xgrammar.forms import FORMS

        try:
            compiled = FORMS[spec.form](compiler, spec.text)
        except (ValueError, RuntimeError) as error:
            reason = str(error).partition(": ")[2] if isinstance(error, RuntimeError) else ""
            reason = " ".join((reason or str(error)).split())[:300].rstrip(".")
            raise RequestError(
                f"the {spec.form} is not supported: {reason}.", parameter="structured_outputs"
            ) from None
        with self._lock:
            self._compiled[spec.form, spec.text] = compiled
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
        return Matcher(compiled, spec.stop_token_ids, self._context.vocab_size)

    def find(self, spec: GrammarSpec) -> GrammarMatcher | None:
        """Return a new matcher of a grammar that is compiled already, or None."""
        with self._lock:
            compiled = self._compiled.get((spec.form, spec.text))
            if compiled is None:
                return None
            self._compiled.move_to_end((spec.form, spec.text))
        return Matcher(compiled, spec.stop_token_ids, self._context.vocab_size)

    def _prepare(self) -> xgrammar.GrammarCompiler:
        tokenizer = self._context.tokenizer
        pieces = None if tokenizer is None else tokenizer.token_pieces(skip_special_tokens=False)
        if tokenizer is None or pieces is None:
            raise RequestError(
                "structured_outputs needs a tokenizer whose tokens have a text of their own. Leave "
                "structured_outputs out.",
                parameter="structured_outputs",
            )
        with self._preparing:
            if self._compiler is None:
                self._compiler = _compiler(tokenizer, pieces, self._context.vocab_size)
            return self._compiler


def _compiler(
    tokenizer: Tokenizer, pieces: TokenPieces, vocab_size: int
) -> xgrammar.GrammarCompiler:
    try:
        from xgrammar import GrammarCompiler, TokenizerInfo, VocabType
    except ImportError as error:
        raise RequestError(
            f"structured_outputs needs the library xgrammar, which cannot be imported: {error}.",
            parameter="structured_outputs",
        ) from None
    found = [pieces[token] for token in range(min(tokenizer.vocab_size, vocab_size))]
    texts = [one.encode() if isinstance(one, str) else bytes(one) for one in found]
    for token in tokenizer.special_token_ids:
        if token < len(texts):
            texts[token] = b""  # a special token is never part of a text
    end = tokenizer.eos_token_id
    info = TokenizerInfo(
        texts, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[0 if end is None else end]
    )
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)

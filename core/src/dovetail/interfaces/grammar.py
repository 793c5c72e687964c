"""The contract of a grammar backend: it determines the allowed next tokens of a request.

The backend of an engine compiles grammars (a JSON schema, a regular expression) to matchers. A
matcher follows the tokens of one request and fills its bit mask of `GrammarOutput`. Both run in the
engine's process, not in the worker, and use no tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.retired_names import reject_retired


@dataclass(frozen=True, kw_only=True)
class GrammarContext:
    """Constructor arguments of a grammar backend.

    tokenizer: None if the engine has none (`skip_tokenizer_init`). vocab_size: width of the logits,
    in tokens. options: the user's options from `plugin_options`.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """The grammar of a request.

    form: one of the backend's `forms`. text: the grammar. stop_token_ids: tokens that end the
    request; at least one.
    """

    form: str
    text: str
    stop_token_ids: frozenset[int]


class GrammarMatcher(Protocol):
    """The position of one request in its grammar. Used by one thread."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Accept `token_ids` up to the first disallowed one. Return how many."""

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, which were rejected drafts."""

    def fill_bitmask(self, words: memoryview) -> None:
        """Set the bit of each allowed token to 1.

        words: ceil(vocab_size / 32) little-endian uint32 words as bytes (format "B"), all zero;
        bit t % 8 of byte t // 8 is token t. At least one token must be allowed. If the text may end
        here, the request's stop tokens are allowed.
        """

    def is_finished(self) -> bool:
        """Return whether only stop tokens are allowed."""


class GrammarBackend(ABC):
    """Compiles grammars.

    forms: supported kinds of grammars, such as "json_schema", "regex" or "ebnf". examples: by form,
    a grammar for documentation and test suites.
    """

    CONTRACT: ClassVar[str] = "grammar"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    forms: ClassVar[frozenset[str]] = frozenset()
    examples: ClassVar[Mapping[str, str]]

    @abstractmethod
    def __init__(self, context: GrammarContext) -> None:
        """Prepare the vocabulary. Called once. May take seconds."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a new matcher. Raise RequestError if the text is not a valid grammar.

        Called concurrently in several threads while steps run. The text comes from an untrusted
        client: limit the time and memory of each call.
        """

    def find(self, spec: GrammarSpec) -> GrammarMatcher | None:
        """Return a new matcher of a grammar that was compiled before, or None.

        Called in the engine's thread, so it must take microseconds.
        """
        return None

    def fill_bitmasks(self, matchers: Sequence[GrammarMatcher], words: memoryview) -> None:
        """Fill the masks of several requests, which are concatenated in `words`.

        words: all zero; one mask per matcher, in the format of `GrammarMatcher.fill_bitmask`. If
        this method raises, the engine calls `fill_bitmask` of each matcher instead.
        """
        row_bytes = words.nbytes // len(matchers)
        for row, matcher in enumerate(matchers):
            matcher.fill_bitmask(words[row * row_bytes : (row + 1) * row_bytes])


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = reject_retired(__name__)

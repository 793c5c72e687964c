"""The contract of a grammar backend: which tokens may come next.

One backend an engine compiles texts (a JSON schema, a regular expression) to matchers. One matcher
a request follows the request's tokens and fills its part of the bit masks of `GrammarOutput`.
It runs in the engine's process, not in the worker, and knows no tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

from dovetail.interfaces.tokenizer import Tokenizer
from dovetail.retired_names import refuse_retired


@dataclass(frozen=True, kw_only=True)
class GrammarContext:
    """All that a backend is made from.

    tokenizer: None if the engine has none (`skip_tokenizer_init`). vocab_size: width of the logits,
    in tokens. options: the user's, from `plugin_options`.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """What a request wants its output to be.

    form: one of the backend's `forms`. text: the grammar. stop_token_ids: tokens that end the
    request; at least one.
    """

    form: str
    text: str
    stop_token_ids: frozenset[int]


class GrammarMatcher(Protocol):
    """One request's place in its grammar. Used from one thread."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go along `token_ids`; return how many of them, from the first, the grammar allows."""

    def rollback(self, num_tokens: int) -> None:
        """Go back over the last `num_tokens` accepted tokens: drafts that were not taken."""

    def fill_bitmask(self, words: memoryview) -> None:
        """Set bit 1 for each allowed token.

        words: ceil(vocab_size / 32) little-endian uint32 words as bytes (format "B"), all zero;
        bit t % 8 of byte t // 8 is token t. At least one token is allowed. Where the text may end,
        the request's stop tokens are.
        """

    def is_finished(self) -> bool:
        """Return whether only the end may follow."""


class GrammarBackend(ABC):
    """Compiles grammars.

    forms: those that it knows, such as "json_schema", "regex" or "ebnf". examples: a text for forms
    of it, for documentation and suites.
    """

    CONTRACT: ClassVar[str] = "grammar"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    forms: ClassVar[frozenset[str]] = frozenset()
    examples: ClassVar[Mapping[str, str]]

    @abstractmethod
    def __init__(self, context: GrammarContext) -> None:
        """Prepare for a vocabulary; this may take seconds, once."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> GrammarMatcher:
        """Return a matcher at its beginning; raise RequestError for a text that is not a grammar.

        Called in threads beside the steps, several at a time. The text comes from a client that is
        not trusted: limit the time and memory of each call.
        """


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = refuse_retired(__name__)

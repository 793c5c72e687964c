"""A sketch of the contract of a grammar backend: which tokens may come next.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
one backend a kind of engine compiles texts (JSON schema, regular expression, EBNF) to grammars; one
matcher a request walks along its tokens and fills the bit masks of `GrammarOutput`.
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
    """All that a backend is made from. vocab_size: width of the logits, in tokens."""

    tokenizer: Tokenizer
    vocab_size: int
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GrammarSpec:
    """What a request wants its output to be. form: one of the backend's `forms`."""

    form: str
    text: str


class GrammarMatcher(Protocol):
    """One request's place in its grammar. Used from one thread."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Go along `token_ids`; return how many of them, from the first, the grammar allows."""

    def rollback(self, num_tokens: int) -> None:
        """Go back over the last `num_tokens` accepted tokens: drafts that were not taken."""

    def fill_bitmask(self, words: memoryview) -> None:
        """Set, in ceil(vocab_size / 32) little-endian uint32 words, bit 1 for each allowed token.

        At least one token is always allowed: at the end of the grammar, EOS.
        """

    def is_finished(self) -> bool:
        """Return whether only the end may follow."""


class GrammarBackend(ABC):
    """Compiles grammars. forms: "json_schema", "regex", "ebnf", …, as far as it knows them."""

    CONTRACT: ClassVar[str] = "grammar"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    forms: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __init__(self, context: GrammarContext) -> None:
        """Prepare for a vocabulary; this may take seconds, once."""

    @abstractmethod
    def compile(self, ask: GrammarSpec) -> GrammarMatcher:
        """Return a matcher at its beginning; raise RequestError for a text that is not a grammar.

        May be called from several threads, and must bound its own time and memory: the text is
        a stranger's.
        """


if not TYPE_CHECKING:  # a type checker reports an unknown name itself
    __getattr__ = refuse_retired(__name__)

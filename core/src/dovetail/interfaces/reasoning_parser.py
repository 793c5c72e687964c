"""A sketch of the contract of a reasoning parser: thoughts apart from the answer.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
one parser a request, fed with text as it comes, like a tool parser.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ReasoningParserContext:
    """All that a parser is made from."""

    tokenizer: Tokenizer
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """What a piece of text turned out to be."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Separates reasoning from content.

    Contract. All pieces together give what the whole text gives, however it is cut; nothing is lost
    but the marks between the two, and nothing raises.
    """

    CONTRACT: ClassVar[str] = "reasoning_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: ReasoningParserContext) -> None:
        """Make it for one completion."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Take in the next piece; return what is certain by now."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """Return what was held back, at the end of the text."""

    @abstractmethod
    def is_reasoning_over(self, token_ids: Sequence[int]) -> bool:
        """Return whether these output tokens have left the reasoning: a grammar may then begin."""

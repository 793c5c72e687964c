"""A draft contract of a reasoning parser: it separates reasoning from the answer.

There is no implementation yet, and the first one may still change the contract. Like a tool parser,
one parser per request receives the text as it is generated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ReasoningParserContext:
    """Constructor arguments of a reasoning parser."""

    tokenizer: Tokenizer
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """The reasoning and the content in a piece of text."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser(ABC):
    """Separates reasoning from content.

    Contract. The result does not depend on how the text is split into pieces. Only the markers
    between reasoning and content are removed. No text raises an error.
    """

    CONTRACT: ClassVar[str] = "reasoning_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: ReasoningParserContext) -> None:
        """Create the parser of one completion."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Process the next piece of text and return what can be classified so far."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """Return the text that was held back. Called at the end of the text."""

    @abstractmethod
    def is_reasoning_over(self, token_ids: Sequence[int]) -> bool:
        """Return whether the reasoning ends within these output tokens, so a grammar may apply."""

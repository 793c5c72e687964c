"""The contract of a reasoning parser: it separates reasoning from the answer.

Each completion has its own parser, which receives the text as it is generated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ReasoningParserContext:
    """Constructor arguments of a reasoning parser.

    prompt_end: the end of the prompt's text, which may already open the reasoning.
    """

    tokenizer: Tokenizer
    prompt_end: str = ""
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningDelta:
    """The reasoning and the content in a piece of text."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningMarkers:
    """The markers around the reasoning of a completion.

    end: ends the reasoning. start: begins it in the output; "" if the prompt already contains it.
    answer: the marker, if any, that the model writes between `end` and the answer.
    """

    end: str
    start: str = ""
    answer: str = ""


class ReasoningParser(ABC):
    """Separates reasoning from content.

    Contract: The result does not depend on how the text is split into pieces. Only the markers
    between reasoning and content, and white space next to them, are removed. No text raises an
    error.

    template_marks: automatic selection chooses this parser if the model's chat template contains
    all of these strings. If several parsers match, it chooses the one whose strings have the most
    characters in total. Empty: never chosen.
    example: a text with the reasoning "I think." and the content "Yes."; the conformance suite
    parses it.
    """

    CONTRACT: ClassVar[str] = "reasoning_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.3"
    template_marks: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""

    @abstractmethod
    def __init__(self, context: ReasoningParserContext) -> None:
        """Create the parser of one completion."""

    @abstractmethod
    def feed(self, text: str) -> ReasoningDelta:
        """Process the next piece of text and return what can be classified so far."""

    @abstractmethod
    def finish(self) -> ReasoningDelta:
        """Return the text that was held back. Called at the end of the text."""

    def markers(self) -> ReasoningMarkers | None:
        """Return the markers of this completion, or None if it has no reasoning.

        A grammar applies only after the end marker. A limit on reasoning tokens forces the end
        marker.
        """
        return None

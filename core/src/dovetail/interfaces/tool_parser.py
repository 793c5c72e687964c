"""A sketch of the contract of a tool parser: calls of tools out of a model's text.

Version 0.x without an implementation: whoever writes the first one may still change it. The idea:
one parser a request, fed with text as it comes; the whole text is the case of a single piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dovetail.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ToolParserContext:
    """All that a parser is made from. tools: the request's, as JSON schemas of the OpenAI form."""

    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """More of one call. index: which. name: once, with its first piece. arguments: JSON text."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """What a piece of text turned out to be: content for the user, and more of some calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolParser(ABC):
    """Separates calls from content.

    Contract. All pieces together give what the whole text gives, however it is cut. Text that is
    not well-formed call is content: nothing is lost and nothing raises.
    """

    CONTRACT: ClassVar[str] = "tool_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: ToolParserContext) -> None:
        """Make it for one completion."""

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """Take in the next piece; return what is certain by now."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """Return what was held back, at the end of the text."""

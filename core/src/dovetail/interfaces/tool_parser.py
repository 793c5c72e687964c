"""A draft contract of a tool parser: it extracts tool calls from a model's text.

There is no implementation yet, and the first one may still change the contract. One parser per
request receives the text as it is generated; a complete text is passed as a single piece.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dovetail.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ToolParserContext:
    """Constructor arguments of a tool parser.

    tools: the tools of the request, as OpenAI JSON schemas.
    """

    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A piece of one tool call.

    index: number of the call. name: the function's name, only in the first piece of the call.
    arguments: a piece of the JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """The content for the user and the pieces of tool calls in a piece of text."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ToolParser(ABC):
    """Separates tool calls from content.

    Contract. The result does not depend on how the text is split into pieces. Text that is not a
    well-formed call is content. No text is lost, and no text raises an error.
    """

    CONTRACT: ClassVar[str] = "tool_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.1"

    @abstractmethod
    def __init__(self, context: ToolParserContext) -> None:
        """Create the parser of one completion."""

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """Process the next piece of text and return what can be classified so far."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """Return the text that was held back. Called at the end of the text."""

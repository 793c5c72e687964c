"""A draft contract of a tool parser: it extracts tool calls from a model's text.

One parser per completion receives the text as it is generated; a complete text is passed as a
single piece. Constrained calls may still change the contract.
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

    Contract. The result does not depend on how the text is split into pieces. A call starts when
    its function's name is read; its arguments follow as they are generated. Text without such a
    start, and a call of a function that the request does not offer, are content. No text raises an
    error.

    template_marks: the format is chosen for a chat template that contains all of these texts; of
    several formats, the one with the most characters. Empty: the format is never chosen.
    """

    CONTRACT: ClassVar[str] = "tool_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    template_marks: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def __init__(self, context: ToolParserContext) -> None:
        """Create the parser of one completion."""

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """Process the next piece of text and return what can be classified so far."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """Return the text that was held back. Called at the end of the text."""

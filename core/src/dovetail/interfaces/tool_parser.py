"""The contract of a tool parser: it extracts tool calls from a model's text.

One parser per completion receives the text as it is generated; a complete text is passed as a
single piece.
"""

from __future__ import annotations

import uuid
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

    index: index of the call in the message. name: the function's name, only in the first piece of
    the call. arguments: a piece of the JSON text.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDelta:
    """The content for the user and the pieces of tool calls in a piece of text."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallText:
    """The text of a call: `begin`, the arguments as JSON, `end`.

    begin: contains the function's name. trigger: a prefix of `begin` that occurs only at the start
    of a call; "" if there is no such prefix. A call without a trigger is constrained only where a
    call is required. separator: the text between two calls; None if a message has at most one call
    of this form.
    """

    begin: str
    end: str
    trigger: str = ""
    separator: str | None = None


class ToolParser(ABC):
    """Separates tool calls from content.

    Contract: The result does not depend on how the text is split into pieces. A call starts when
    its function's name is read; its arguments follow as they are generated. Text without such a
    start, and a call of a function that the request does not offer, are content. No text raises an
    error.

    template_marks: automatic selection chooses this parser if the model's chat template contains
    all of these strings. If several parsers match, it chooses the one whose strings have the most
    characters in total. Empty: never chosen.
    example: the text of a call of the function `get_weather` with the arguments
    {"city": "Paris", "days": 3}; the conformance suite parses it.
    """

    CONTRACT: ClassVar[str] = "tool_parser"
    CONTRACT_VERSION: ClassVar[str] = "0.3"
    template_marks: ClassVar[tuple[str, ...]] = ()
    example: ClassVar[str] = ""

    @abstractmethod
    def __init__(self, context: ToolParserContext) -> None:
        """Create the parser of one completion."""

    @abstractmethod
    def feed(self, text: str) -> ToolDelta:
        """Process the next piece of text and return what can be classified so far."""

    @abstractmethod
    def finish(self) -> ToolDelta:
        """Return the text that was held back. Called at the end of the text."""

    @classmethod
    def call_text(cls, name: str) -> CallText | None:
        """Return the text around the arguments of a call of the function `name`.

        It lets a grammar force a call, or constrain one that the model begins. None: calls in this
        format are never constrained.
        """
        return None

    @classmethod
    def new_call_id(cls) -> str:
        """Return a new id for a call, of the form that the model's chat template accepts."""
        return f"call_{uuid.uuid4().hex[:24]}"

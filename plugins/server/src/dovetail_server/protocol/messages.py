"""Tools, tool calls and reasoning of chat completions, in OpenAI's format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dovetail.engine.async_llm import AsyncLLM
from dovetail.engine.messages.parsers import MessageParser, MessageParsers, parse_message
from dovetail.engine.messages.tool_use import ToolUse, constrain, read_tools
from dovetail.errors import RequestError
from dovetail.outputs import ChatMessage
from dovetail_server.protocol.errors import api_error
from dovetail_server.protocol.fields import ChatRequest
from dovetail_server.protocol.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading the text of a request's choices.

    use: the tools. prompt_end: the end of the prompt's text. hidden: a pattern of special tokens,
    which are not shown; None to show them. with_reasoning: whether the reasoning is returned.
    """

    parsers: MessageParsers
    use: ToolUse
    prompt_end: str
    hidden: re.Pattern[str] | None
    with_reasoning: bool

    def parser(self) -> MessageParser | None:
        """Return the parser of a choice, or None if its whole text is content."""
        return self.parsers.make(self.use.offered, self.prompt_end)


def read_use(request: ChatRequest) -> ToolUse:
    """Return the tools of a request. Raise an APIError that names an invalid field."""
    try:
        return read_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    except RequestError as error:
        raise api_error(error) from None


def apply_reading(
    llm: AsyncLLM, request: ChatRequest, sampling: Sampling, reading: Reading
) -> Sampling:
    """Return `sampling` with the grammar of the tool calls and the reasoning limit.

    Raises an APIError that names an invalid field.
    """
    parsers = reading.parsers
    try:
        params = constrain(
            sampling.params,
            reading.use,
            parser_cls=parsers.tool_parser_cls,
            markers=parsers.markers(reading.prompt_end),
            has_grammar=llm.config.extensions.grammar_backend is not None,
            thinking_budget=request.thinking_budget,
        )
    except RequestError as error:
        raise api_error(error, sampling.names) from None
    names = dict(sampling.names)
    if params.structured_outputs is not sampling.params.structured_outputs:
        names.setdefault("structured_outputs", "tools")
        names.setdefault("structured_outputs.form", "tools")
    if request.thinking_budget is not None:
        names["reasoning"] = names["reasoning.budget"] = "thinking_budget"
    if reading.parser() is not None:
        params = replace(params, skip_special_tokens=False)
    return replace(sampling, params=params, names=names)


class ChoiceReader:
    """Reads the text of one choice as it is generated."""

    def __init__(self, reading: Reading, parser: MessageParser) -> None:
        self._reading = reading
        self._parser = parser
        self._has_calls = False

    def delta(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Return the `delta` of an event for the next piece of text, or {} if nothing is new."""
        message_delta = self._parser.finish(text) if is_last else self._parser.feed(text)
        delta: dict[str, Any] = {}
        if content := _shown(message_delta.content, self._reading.hidden):
            delta["content"] = content
        reasoning = _shown(message_delta.reasoning, self._reading.hidden)
        if reasoning and self._reading.with_reasoning:
            delta["reasoning"] = delta["reasoning_content"] = reasoning
        if message_delta.calls:
            self._has_calls = True
            delta["tool_calls"] = [
                self._call(call.index, call.name, call.arguments) for call in message_delta.calls
            ]
        return delta

    def message(self, text: str) -> dict[str, Any]:
        """Return the `message` of a choice."""
        message = parse_message(self._parser, text, self._reading.parsers.tool_parser_cls)
        self._has_calls = bool(message.tool_calls)
        return _message(message, self._reading)

    def finish_reason(self, reason: str | None) -> str | None:
        """Return the finish reason: "tool_calls" in place of "stop" if there are tool calls."""
        return "tool_calls" if reason == "stop" and self._has_calls else reason

    def _call(self, index: int, name: str | None, arguments: str) -> dict[str, Any]:
        if name is None:
            return {"index": index, "function": {"arguments": arguments}}
        cls = self._reading.parsers.tool_parser_cls
        return {
            "index": index,
            "id": cls.new_call_id() if cls is not None else "",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


def _message(parsed: ChatMessage, reading: Reading) -> dict[str, Any]:
    shown = parsed.content if parsed.content is None else _shown(parsed.content, reading.hidden)
    message: dict[str, Any] = {**parsed.to_dict(), "content": shown, "refusal": None}
    if reading.with_reasoning and reading.parsers.reasoning is not None:
        reasoning = parsed.reasoning and _shown(parsed.reasoning, reading.hidden)
        message["reasoning"] = message["reasoning_content"] = reasoning
    return message


def _shown(text: str, hidden: re.Pattern[str] | None) -> str:
    return hidden.sub("", text) if hidden is not None and text else text


def tool_variables(request: ChatRequest, use: ToolUse) -> Mapping[str, Any]:
    """Return the variables of the chat template for tools and reasoning."""
    variables: dict[str, Any] = {}
    if use.shown:
        variables["tools"] = list(use.shown)
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return variables

"""Tools and reasoning of `LLM.chat`: constrains the requests and reads the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dovetail.engine.llm_engine import LLMEngine
from dovetail.engine.messages.parsers import MessageParsers, parse_message
from dovetail.engine.messages.tool_use import ToolUse, constrain, read_tools
from dovetail.entrypoints.call_arguments import check_choice
from dovetail.outputs import ChatMessage, RequestOutput
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import plain_copy

MAX_TOOLS_BYTES = 2**22
"""Approximate maximum size of the tools of a request."""


def read_chat_tools(tools: Any, tool_choice: Any, parallel_tool_calls: Any) -> ToolUse:
    """Return the tools of a chat request. Raise RequestError that names an invalid argument."""
    check_choice("parallel_tool_calls", parallel_tool_calls, (True, False))
    plain = [
        value if value is None else plain_copy(name, value, max_bytes=MAX_TOOLS_BYTES)
        for name, value in (("tools", tools), ("tool_choice", tool_choice))
    ]
    return read_tools(plain[0], plain[1], parallel_tool_calls)


def constrain_chat(
    engine: LLMEngine, params: SamplingParams | None, use: ToolUse, prompt: Any
) -> SamplingParams | None:
    """Return the parameters of a chat request, with the grammar of its calls.

    params: the user's parameters; None for the model's defaults. Raises RequestError, naming the
    field, if the engine does not support the request.
    """
    parsers = engine.front.parsers
    text = prompt["prompt"]
    if params is not None and not isinstance(params, SamplingParams):
        return params  # `generate` rejects it
    if parsers.make(use.offered, text) is None and not use.offered:
        return params
    sampling = engine.default_sampling_params() if params is None else params
    constrained = constrain(
        sampling,
        use,
        parser_cls=parsers.tool_parser_cls,
        markers=parsers.markers(text),
        has_grammar=engine.config.extensions.grammar_backend is not None,
    )
    return replace(constrained, skip_special_tokens=False)


def read_outputs(parsers: MessageParsers, use: ToolUse, outputs: Sequence[RequestOutput]) -> None:
    """Set the message of each completion."""
    for output in outputs:
        for item in output.outputs:
            parser = parsers.make(use.offered, output.prompt or "")
            if parser is None:
                item.message = ChatMessage(content=item.text)
            else:
                item.message = parse_message(parser, item.text, parsers.tool_parser_cls)

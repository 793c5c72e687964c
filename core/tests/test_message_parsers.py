"""Message parsing: reasoning first, then tool calls. If a parser plugin fails, no text is lost."""

from __future__ import annotations

from typing import Any

import pytest

from dovetail.engine.messages.parsers import MessageParser, MessageParsers, parse_message
from dovetail.interfaces import ReasoningParserContext, ToolParserContext
from dovetail_devkit.fakes.reasoning_parser import FakeReasoningParser
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.fakes.tool_parser import FakeToolParser

TOOLS = [{"type": "function", "function": {"name": "add"}}]
TEXT = '<why>I add.</why>Wait. <call>add {"a": 1}</call>'


class FailsAfterTwo(FakeToolParser):
    num_calls = 0

    def feed(self, text: str) -> Any:
        self.num_calls += 1
        if self.num_calls > 2:
            raise ValueError("a fault of the plugin")
        return super().feed(text)


class FailsToReason(FakeReasoningParser):
    def feed(self, text: str) -> Any:
        raise ValueError("a fault of the plugin")


def parser(
    tools: type[FakeToolParser] = FakeToolParser,
    reasoning: type[FakeReasoningParser] = FakeReasoningParser,
) -> MessageParser:
    tokenizer = ByteTokenizer()
    return MessageParser(
        reasoning(ReasoningParserContext(tokenizer=tokenizer)),
        tools(ToolParserContext(tokenizer=tokenizer, tools=TOOLS)),
    )


def test_tool_calls_are_found_in_the_text_after_the_reasoning() -> None:
    message = parse_message(parser(), TEXT, FakeToolParser)
    assert (message.reasoning, message.content) == ("I add.", "Wait. ")
    (call,) = message.tool_calls
    assert (call.name, call.arguments) == ("add", '{"a": 1}') and call.id.startswith("call_")


def test_a_tool_call_in_the_reasoning_is_part_of_the_reasoning() -> None:
    text = '<why><call>add {"a": 1}</call></why>No.'
    message = parse_message(parser(), text, FakeToolParser)
    assert message.reasoning == '<call>add {"a": 1}</call>' and not message.tool_calls


def test_a_text_parsed_in_pieces_gives_the_same_message_as_the_whole_text() -> None:
    whole = parser().finish(TEXT)
    message_parser = parser()
    deltas = [message_parser.feed(char) for char in TEXT] + [message_parser.finish()]
    assert "".join(delta.content for delta in deltas) == whole.content
    assert "".join(delta.reasoning for delta in deltas) == whole.reasoning
    assert "".join(call.arguments for delta in deltas for call in delta.calls) == '{"a": 1}'


def test_a_message_for_the_next_request_has_the_openai_format() -> None:
    message = parse_message(parser(), TEXT, FakeToolParser)
    assert message.to_dict()["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert "reasoning" not in message.to_dict()


@pytest.mark.parametrize("kinds", [{"tools": FailsAfterTwo}, {"reasoning": FailsToReason}])
def test_a_parser_that_fails_leaves_the_rest_of_the_text_as_content(
    kinds: Any, caplog: pytest.LogCaptureFixture
) -> None:
    message_parser = parser(**kinds)
    deltas = [
        message_parser.feed("Hel"),
        message_parser.feed("lo "),
        message_parser.feed("world"),
        message_parser.finish("!"),
    ]
    assert "".join(delta.content for delta in deltas) == "Hello world!"
    assert len(caplog.records) == 1 and "parser failed" in caplog.text


def test_without_parsers_the_text_is_not_parsed() -> None:
    parsers = MessageParsers(tokenizer=ByteTokenizer(), tools=None, reasoning=None)
    assert parsers.make(TOOLS, "") is None and parsers.markers("") is None

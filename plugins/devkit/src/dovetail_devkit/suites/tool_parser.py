"""The conformance suite of the tool parser contract. It reads the parser's `example`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dovetail.interfaces.tool_parser import ToolDelta, ToolParser, ToolParserContext
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.fakes.tokenizer import ByteTokenizer
from dovetail_devkit.text_pieces import random_pieces

NAME = "get_weather"
ARGUMENTS = {"city": "Paris", "days": 3}
NUM_SPLITS = 20
PLAIN_TEXTS = ("", " ", "Hello, world.", "1 < 2 and {3}", "a\n\nb <", "[", "é€")


@dataclass(kw_only=True)
class ParsedText:
    """The result of a parser: the content, and the name and arguments of each tool call."""

    content: str
    calls: list[list[str]]


@checking("tool_parser")
def check_tool_parser(
    parser_cls: type[ToolParser], *, options: Mapping[str, object] | None = None
) -> None:
    """Check a parser against its contract. Raise AssertionError with the violated rule.

    options: constructor options of the parser.
    """
    suite = _Suite(parser_cls, options or {})
    suite.check_example()
    suite.check_plain_texts()
    suite.check_damaged_texts()
    suite.check_call_text()
    ids = {parser_cls.new_call_id() for _ in range(100)}
    expect(len(ids) == 100, "new_call_id must return a new id each time")


class _Suite:
    def __init__(self, cls: type[ToolParser], options: Mapping[str, object]) -> None:
        self._cls = cls
        self._options = options

    def check_example(self) -> None:
        """Check the example: one call, read as it is generated, if the function is offered."""
        text = self._cls.example
        expect(bool(text), "the attribute `example` is empty")
        parsed = self._read([text])
        expect(len(parsed.calls) == 1, f"example must contain one tool call; found {parsed.calls}")
        self._check_call(parsed.calls[0], "example")
        expect(not parsed.content.strip(), f"example gives the content {parsed.content!r}")
        self._check_splits(text, parsed)
        parser = self._make()
        deltas = [parser.feed(char) for char in text]
        indexes = [index for index, delta in enumerate(deltas) if delta.calls]
        expect(
            len(indexes) > 1,
            "feed must return the name of a tool call when it is read, and its arguments as they "
            "follow",
        )
        unknown = self._read([text], names=("other",))
        expect(
            not unknown.calls and NAME in unknown.content,
            "a tool call to a function that is not offered must be content",
        )

    def check_plain_texts(self) -> None:
        """Check that text without a tool call is content."""
        for text in PLAIN_TEXTS:
            parsed = self._read([text])
            expect(
                not parsed.calls and parsed.content == text,
                f"the text {text!r} has no tool call, but gives {parsed}",
            )
            self._check_splits(text, parsed)

    def check_damaged_texts(self) -> None:
        """Check that no text raises an error, and that the result does not depend on the pieces."""
        random = Random(1)
        text = self._cls.example
        for size in range(len(text)):
            self._check_splits(text[:size], self._read([text[:size]]), num_splits=2)
        for _ in range(NUM_SPLITS):
            damaged = list(text)
            random.shuffle(damaged)
            shuffled = "".join(damaged)
            self._check_splits(shuffled, self._read([shuffled]), num_splits=2)

    def check_call_text(self) -> None:
        """Check that the parser reads the tool calls that a grammar forces."""
        text = self._cls.call_text(NAME)
        if text is None:
            return
        expect(text.begin.startswith(text.trigger), "call_text: begin must start with trigger")
        call = text.begin + json.dumps(ARGUMENTS) + text.end
        texts = [call] if text.separator is None else [call, call + text.separator + call]
        for number, item in enumerate(texts, start=1):
            parsed = self._read([item])
            expect(
                len(parsed.calls) == number,
                f"the parser must find {number} tool calls in {item!r}, built from call_text(); "
                f"found {parsed}",
            )
            for parsed_call in parsed.calls:
                self._check_call(parsed_call, "call_text")

    def _check_call(self, call: Sequence[str], where: str) -> None:
        name, arguments = call
        try:
            read = json.loads(arguments)
        except ValueError:
            read = arguments
        expect(
            name == NAME and read == ARGUMENTS,
            f"the tool call in {where} must be {NAME} with {ARGUMENTS}; found {name!r} with "
            f"{read!r}",
        )

    def _check_splits(self, text: str, whole: ParsedText, num_splits: int = NUM_SPLITS) -> None:
        splits = [list(text)] + [random_pieces(text, Random(seed)) for seed in range(num_splits)]
        for pieces in splits:
            parsed = self._read(pieces)
            expect(
                parsed == whole,
                f"the pieces {pieces!r:.300} give {parsed}, but the whole text gives {whole}",
            )

    def _make(self, names: Sequence[str] = (NAME,)) -> ToolParser:
        tools = [_tool(name) for name in names]
        return self._cls(
            ToolParserContext(tokenizer=ByteTokenizer(), tools=tools, options=self._options)
        )

    def _read(self, pieces: Sequence[str], names: Sequence[str] = (NAME,)) -> ParsedText:
        parser = self._make(names)
        parsed = ParsedText(content="", calls=[])
        for delta in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
            expect(isinstance(delta, ToolDelta), "feed and finish must return a ToolDelta")
            parsed.content += delta.content
            for call in delta.calls:
                if call.name is not None:
                    expect(call.index == len(parsed.calls), "tool calls must be numbered from 0")
                    parsed.calls.append([call.name, ""])
                is_named = call.index < len(parsed.calls)
                expect(is_named, "the first piece of a tool call must have a name")
                parsed.calls[call.index][1] += call.arguments
        return parsed


def _tool(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}

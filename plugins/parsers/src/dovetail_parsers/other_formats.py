"""Tool parsers of the formats whose arguments are not JSON, and of the channels of harmony."""

from __future__ import annotations

import json
import re
from typing import ClassVar

from dovetail_parsers.base import EXAMPLE, JSON_CALL, MarkedToolParser, StreamedToolParser
from dovetail_parsers.cursor import MalformedCallError, Steps
from dovetail_parsers.harmony import ENDS, STARTS, read_header


class Qwen3XMLToolParser(MarkedToolParser):
    """Qwen3-Coder: <tool_call><function=f><parameter=a>1</parameter></function></tool_call>.

    Also reads JSON after <tool_call>, which a grammar can force.
    """

    template_marks: ClassVar[tuple[str, ...]] = ("<function=", "<parameter=")
    example = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    )
    call_begin, call_end = JSON_CALL, "}\n</tool_call>"
    opens = ("<tool_call>", "<function=")
    closes = ("</function>", "</tool_call>")

    def _read(self, marker: str) -> Steps[bool]:
        return (yield from self.attempt(marker, self._one(marker)))

    def _one(self, marker: str) -> Steps[None]:
        cursor = self.cursor
        if marker == "<tool_call>":
            if (yield from cursor.skip_space()) == "{":
                yield from self.json_call()
                return
            yield from cursor.expect("<function=")
        name, _ = yield from cursor.word((">",))
        self.open_call(name)
        yield from cursor.skip_space()
        while (yield from cursor.accept("<parameter=")):
            key, _ = yield from cursor.word((">",))
            parts: list[str] = []
            if not (yield from cursor.until(("</parameter>",), parts.append)):
                raise MalformedCallError
            text = "".join(parts).removeprefix("\n").removesuffix("\n")
            self.parameter(key, self.typed(key, text))
            yield from cursor.skip_space()
        self.close_parameters()


class GLM45ToolParser(MarkedToolParser):
    """GLM-4.5: <tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>.

    Also reads JSON after <tool_call>, which a grammar can force.
    """

    template_marks: ClassVar[tuple[str, ...]] = ("<arg_key>", "<arg_value>")
    example = (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    )
    call_begin, call_end = JSON_CALL, "}\n</tool_call>"
    opens = ("<tool_call>",)
    closes = ("</tool_call>",)

    def _read(self, marker: str) -> Steps[bool]:
        return (yield from self.attempt(marker, self._one()))

    def _one(self) -> Steps[None]:
        cursor = self.cursor
        if (yield from cursor.skip_space()) == "{":
            yield from self.json_call()
            return
        name, stop = yield from cursor.word(("<arg_key>", "</tool_call>"))
        self.open_call(name.strip())
        while stop == "<arg_key>":
            key, _ = yield from cursor.word(("</arg_key>",))
            yield from cursor.skip_space()
            yield from cursor.expect("<arg_value>")
            parts: list[str] = []
            if not (yield from cursor.until(("</arg_value>",), parts.append)):
                raise MalformedCallError
            self.parameter(key.strip(), self.typed(key.strip(), "".join(parts)))
            yield from cursor.skip_space()
            stop = "<arg_key>" if (yield from cursor.accept("<arg_key>")) else ""
        self.close_parameters()


class HarmonyToolParser(StreamedToolParser):
    """gpt-oss: the messages of the channel commentary that are addressed to functions."""

    template_marks: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|message|>")
    example = (
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{EXAMPLE}<|call|>"
    )
    call_begin = "<|channel|>commentary to=functions.FUNCTION <|constrain|>json<|message|>"
    call_separator = None

    def _parse(self) -> Steps[None]:
        cursor = self.cursor
        while marker := (yield from cursor.until(STARTS + ENDS, self.content)):
            if marker in ENDS:
                continue
            cursor.record(marker)
            header = yield from read_header(cursor, marker)
            read = self._recorded()
            if header is None:
                self.content(read)
            elif header.function:
                yield from self.attempt(read, self._call(header.function))

    def _call(self, name: str) -> Steps[None]:
        self.open_call(name)
        yield from self.cursor.json_value(self.arguments)


class PythonicToolParser(StreamedToolParser):
    """Calls in Python's syntax: the whole text is [f(a=1), g(b="x")].

    Also reads a list of JSON objects, which a grammar can force.
    """

    template_marks: ClassVar[tuple[str, ...]] = ("[func_name1(",)
    example = '[get_weather(city="Paris", days=3)]'
    call_begin, call_end = '[{"name": "FUNCTION", "arguments": ', "}]"
    call_separator = None

    def _parse(self) -> Steps[None]:
        cursor = self.cursor
        cursor.record("")
        yield from cursor.skip_space()
        is_list = yield from cursor.accept("[")
        before = self._recorded()
        if not is_list:
            self.content(before)
        while is_list and (yield from self.attempt(before, self._one())):
            cursor.record("")
            char = yield from cursor.skip_space()
            if char != ",":
                yield from cursor.accept("]")
                cursor.stop_recording()
                break
            cursor.take(1)
            yield from cursor.skip_space()
            before = self._recorded()
        yield from cursor.rest(self.content)

    def _one(self) -> Steps[None]:
        cursor = self.cursor
        if (yield from cursor.peek()) == "{":
            yield from self.json_call()
            return
        name, _ = yield from cursor.word(("(",))
        if not re.fullmatch(r"[\w.-]+", name):
            raise MalformedCallError
        self.open_call(name)
        stop = ")" if (yield from cursor.skip_space()) == ")" else ""
        if stop:
            cursor.take(1)
        while stop != ")":
            key, _ = yield from cursor.word(("=",))
            text, stop = yield from self._value()
            self.parameter(key.strip(), python_to_json(text.strip()))
            yield from cursor.skip_space()
            if stop == "," and (yield from cursor.accept(")")):
                stop = ")"
        self.close_parameters()

    def _value(self) -> Steps[tuple[str, str]]:
        """Read the text of a value and the comma or bracket after it."""
        cursor, parts, depth = self.cursor, [], 0
        while char := (yield from cursor.peek()):
            cursor.take(1)
            if depth == 0 and char in ",)":
                return "".join(parts), char
            depth += (char in "([{") - (char in ")]}")
            parts.append(char)
            if char in "\"'":
                yield from self._quoted(char, parts)
        raise MalformedCallError

    def _quoted(self, quote: str, parts: list[str]) -> Steps[None]:
        cursor = self.cursor
        while char := (yield from cursor.peek()):
            parts.append(cursor.take(1))
            if char == quote:
                return
            if char == "\\" and (yield from cursor.peek()):
                parts.append(cursor.take(1))
        raise MalformedCallError


_PYTHON_TOKEN = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|\bTrue\b|\bFalse\b|\bNone\b""", re.DOTALL
)
_WORDS = {"True": "true", "False": "false", "None": "null"}


def python_to_json(text: str) -> str:
    """Return a Python literal as JSON. Any other text becomes a string."""
    try:
        value = json.loads(_PYTHON_TOKEN.sub(_json_token, text), strict=False)
        written = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # a lone surrogate, which must stay an escape sequence
        return json.dumps(value)
    return written


def _json_token(match: re.Match[str]) -> str:
    token = match[0]
    if token in _WORDS:
        return _WORDS[token]
    if token[0] == "'":
        token = token[1:-1].replace("\\'", "'")
        return '"' + re.sub(r'(\\.)|"', lambda item: item[1] or '\\"', token, flags=re.DOTALL) + '"'
    return token.replace("\\'", "'")

"""The part that all tool parsers share: content, tool calls, and text that only resembles one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.interfaces import (
    CallText,
    ToolCallDelta,
    ToolDelta,
    ToolParser,
    ToolParserContext,
)
from dovetail_parsers.cursor import Cursor, Emit, MalformedCallError, Steps

EXAMPLE = '{"city": "Paris", "days": 3}'
"""The arguments of the tool calls in `example`."""

JSON_CALL = '<tool_call>\n{"name": "FUNCTION", "arguments": '
"""The start of a tool call in the format of Hermes, which several parsers read."""

_NAME_KEYS = ("name", "tool_name")
_ARGUMENT_KEYS = ("arguments", "parameters")


class StreamedToolParser(ToolParser):
    """Runs the generator `_parse` of a format. A tool call to an unknown function is content.

    call_begin, call_end, call_trigger, call_separator: the fields of `CallText`; FUNCTION stands
    for the name.
    """

    call_begin: ClassVar[str]
    call_end: ClassVar[str] = ""
    call_trigger: ClassVar[str] = ""
    call_separator: ClassVar[str | None] = "\n"

    @classmethod
    def call_text(cls, name: str) -> CallText | None:
        """Return the text around the arguments of a tool call to the function `name`."""
        begin = cls.call_begin.replace("FUNCTION", name)
        return CallText(
            begin=begin, end=cls.call_end, trigger=cls.call_trigger, separator=cls.call_separator
        )

    def __init__(self, context: ToolParserContext) -> None:
        self.cursor = Cursor()
        self._schemas = _parameter_schemas(context.tools)
        self._steps = self._parse()
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._index = -1
        self._is_after_call = False
        self._space = ""
        self._num_parameters = 0
        self._function = ""

    def feed(self, text: str) -> ToolDelta:
        """Process the next piece of text and return what can be classified so far."""
        self.cursor.add(text)
        next(self._steps, None)
        return self._new()

    def finish(self) -> ToolDelta:
        """Return the text that was held back. Called at the end of the text."""
        self.cursor.ended = True
        next(self._steps, None)
        return self._new()

    def _parse(self) -> Steps[None]:
        raise NotImplementedError

    # --- results ------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Add content. White space after a tool call counts only if other text follows it."""
        if self._is_after_call:
            text, self._space = self._space + text, ""
            if not text.strip():
                self._space = text
                return
            self._is_after_call = False
        if text:
            self._content.append(text)

    def open_call(self, name: str) -> None:
        """Begin a tool call. Raise MalformedCallError if no tool of the request has this name."""
        if not name or (self._schemas and name not in self._schemas):
            raise MalformedCallError
        self.cursor.stop_recording()
        self._index += 1
        self._is_after_call, self._space = True, ""
        self._num_parameters, self._function = 0, name
        self._calls.append(ToolCallDelta(index=self._index, name=name))

    def arguments(self, text: str) -> None:
        """Add a piece of the arguments of the open tool call."""
        self._calls.append(ToolCallDelta(index=self._index, arguments=text))

    def parameter(self, key: str, value: str) -> None:
        """Add a parameter of the open tool call. value: JSON."""
        start = ", " if self._num_parameters else "{"
        self._num_parameters += 1
        self.arguments(f"{start}{json.dumps(key, ensure_ascii=False)}: {value}")

    def close_parameters(self) -> None:
        """End the arguments that consist of `parameter` calls."""
        self.arguments("}" if self._num_parameters else "{}")

    def typed(self, key: str, text: str) -> str:
        """Return the JSON of a parameter's text, according to the tool's schema."""
        schema = self._schemas.get(self._function, {}).get(key)
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind != "string":
            try:
                json.loads(text)
            except (ValueError, RecursionError):
                pass
            else:
                return text.strip()
        return json.dumps(text, ensure_ascii=False)

    # --- parts of formats ---------------------------------------------------------------------

    def attempt(self, before: str, steps: Steps[None]) -> Steps[bool]:
        """Run `steps`. If the text is not a tool call, treat the text that was read as content.

        before: the marker that was just read. Returns whether the text was well-formed.
        """
        self.cursor.record(before)
        try:
            yield from steps
        except MalformedCallError:
            self.content(self.cursor.stop_recording() or "")
            return False
        self.cursor.stop_recording()
        return True

    def json_call(self) -> Steps[None]:
        """Read an object such as {"name": "f", "arguments": {…}}, with any order of keys."""
        cursor = self.cursor
        yield from cursor.skip_space()
        yield from cursor.expect("{")
        name, kept, is_first = "", "", True
        has_arguments = False
        while (yield from self._next_item("}", is_first=is_first)):
            is_first = False
            key = yield from self._key()
            if key in _NAME_KEYS and not name:
                name = yield from self._string()
                self.open_call(name) if not has_arguments else None
            elif key in _ARGUMENT_KEYS and not has_arguments:
                has_arguments = True
                kept = yield from self._argument_value(self.arguments if name else None)
            else:
                yield from cursor.json_value(_ignore)
        if not name:
            raise MalformedCallError
        if kept:
            self.open_call(name)
            self.arguments(kept)
        elif not has_arguments:
            self.arguments("{}")

    def json_calls(self, before: str) -> Steps[bool]:
        """Read one object, or a list of objects. before: the marker that was just read."""
        self.cursor.record(before)
        char = yield from self.cursor.skip_space()
        if char != "[":
            return (yield from self.attempt(self._recorded(), self.json_call()))
        self.cursor.take(1)
        before, is_first = self._recorded(), True
        while True:
            self.cursor.record(before)
            try:
                more = yield from self._next_item("]", is_first=is_first)
            except MalformedCallError:
                self.content(self._recorded())
                return False
            if not more:
                self.content(self._recorded()) if is_first else self.cursor.stop_recording()
                return True
            if not (yield from self.attempt(self._recorded(), self.json_call())):
                return False
            before, is_first = "", False

    def _recorded(self) -> str:
        return self.cursor.stop_recording() or ""

    def _next_item(self, end: str, *, is_first: bool) -> Steps[bool]:
        """Read the comma before an item. Return False at the end of the list or object."""
        char = yield from self.cursor.skip_space()
        if char == end:
            self.cursor.take(1)
            return False
        if not is_first:
            yield from self.cursor.expect(",")
            yield from self.cursor.skip_space()
        return True

    def _key(self) -> Steps[str]:
        key = yield from self._string()
        yield from self.cursor.skip_space()
        yield from self.cursor.expect(":")
        yield from self.cursor.skip_space()
        return key

    def _string(self) -> Steps[str]:
        """Read a short JSON string."""
        yield from self.cursor.expect('"')
        text, _ = yield from self.cursor.word(('"',))
        if "\\" in text:
            raise MalformedCallError
        return text

    def _argument_value(self, emit: Emit | None) -> Steps[str]:
        """Read arguments. Pass them on, or return them if `emit` is None.

        A string that contains the arguments as JSON is decoded.
        """
        parts: list[str] = []
        char = yield from self.cursor.skip_space()
        is_text = char == '"'
        if not is_text and char != "{":
            raise MalformedCallError
        yield from self.cursor.json_value(parts.append if is_text or emit is None else emit)
        text = "".join(parts)
        if is_text:
            try:
                text = _encodable(json.loads(text, strict=False))
            except ValueError:
                raise MalformedCallError from None
            if emit is not None:
                emit(text)
        return text if emit is None else ""

    def _new(self) -> ToolDelta:
        delta = ToolDelta(content="".join(self._content), calls=_joined(self._calls))
        self._content, self._calls = [], []
        return delta


class MarkedToolParser(StreamedToolParser):
    """A format in which a marker precedes each tool call or list of tool calls.

    opens: the markers; read from left to right, text outside of tool calls is content. closes: the
    markers after tool calls, which are read if they follow.
    """

    opens: ClassVar[tuple[str, ...]]
    closes: ClassVar[tuple[str, ...]] = ()

    def _parse(self) -> Steps[None]:
        while marker := (yield from self.cursor.until(self.opens, self.content)):
            if (yield from self._read(marker)):
                yield from self._close()

    def _read(self, marker: str) -> Steps[bool]:
        """Read the text after a marker. Return whether it was a tool call."""
        return (yield from self.json_calls(marker))

    def _close(self) -> Steps[None]:
        """Read white space and the markers after a tool call."""
        again = True
        while again:
            again = False
            self.cursor.record("")
            yield from self.cursor.skip_space()
            space = self._recorded()
            for close in self.closes:
                again = again or (yield from self.cursor.accept(close))
            if not again:
                self.content(space)


def _encodable(text: str) -> str:
    """Return a decoded string with U+FFFD for lone surrogates, which JSON can contain."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _ignore(text: str) -> None:
    pass


def _joined(calls: list[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Return one delta for each tool call."""
    names: dict[int, str | None] = {}
    texts: dict[int, list[str]] = {}
    for call in calls:
        names[call.index] = names.get(call.index) or call.name
        texts.setdefault(call.index, []).append(call.arguments)
    return tuple(
        ToolCallDelta(index=index, name=names[index], arguments="".join(parts))
        for index, parts in texts.items()
    )


def _parameter_schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the parameters of each function, by its name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas[function["name"]] = properties if isinstance(properties, Mapping) else {}
    return schemas

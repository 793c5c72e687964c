"""A fake tool parser, for calls such as <call>f {"a": 1}</call>."""

from __future__ import annotations

from typing import ClassVar

from dovetail.interfaces.tool_parser import (
    CallText,
    ToolCallDelta,
    ToolDelta,
    ToolParser,
    ToolParserContext,
)

OPEN, CLOSE = "<call>", "</call>"
MAX_NAME_CHARS = 64


class FakeToolParser(ToolParser):
    """Reads calls between two markers: a function's name, a space, and its arguments."""

    template_marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    example: ClassVar[str] = '<call>get_weather {"city": "Paris", "days": 3}</call>'

    def __init__(self, context: ToolParserContext) -> None:
        self._names = {tool["function"]["name"] for tool in context.tools}
        self._text = ""
        self._num_calls = 0
        self._in_call = False

    @classmethod
    def call_text(cls, name: str) -> CallText | None:
        """Return the text around the arguments of a tool call."""
        return CallText(begin=f"{OPEN}{name} ", end=CLOSE, trigger=OPEN, separator="")

    def feed(self, text: str) -> ToolDelta:
        """Process the next piece of text and return what can be classified so far."""
        self._text += text
        return self._read(is_last=False)

    def finish(self) -> ToolDelta:
        """Return the text that was held back."""
        return self._read(is_last=True)

    def _read(self, *, is_last: bool) -> ToolDelta:
        content, calls = "", []
        while True:
            marker = CLOSE if self._in_call else OPEN
            before, separator, after = self._text.partition(marker)
            if not separator and not is_last:
                size = len(before) - _num_held_back(before, marker)
                before, after = before[:size], before[size:]
            if self._in_call and before:
                calls.append(ToolCallDelta(index=self._num_calls - 1, arguments=before))
            elif before:
                content += before
            self._text = after
            if not separator:
                break
            if self._in_call:
                self._in_call = False
                continue
            name, space, rest = after.partition(" ")
            if not space and not is_last and len(name) <= MAX_NAME_CHARS:
                self._text = marker + after  # wait for the rest of the name
                break
            if not space or name not in self._names:
                content += marker
                continue
            self._in_call, self._text = True, rest
            self._num_calls += 1
            calls.append(ToolCallDelta(index=self._num_calls - 1, name=name))
        return ToolDelta(content=content, calls=tuple(calls))


def _num_held_back(text: str, marker: str) -> int:
    """Return how many characters at the end of `text` can be the start of the marker."""
    sizes = range(len(marker) - 1, 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)

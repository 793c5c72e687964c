"""Reads a text that arrives in pieces, with generators that wait for the next piece.

A generator decides based only on the characters of the text, never on where a piece ends. The
result of a parser that is written with these functions therefore does not depend on the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

MAX_NAME_CHARS = 256
"""Maximum number of characters of a function's name or of a key before a tool call."""

_SPACE = " \t\r\n"
_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]]+')
_SCALAR_END = ",]} \t\r\n"
_MAX_SCALAR_CHARS = 400


class MalformedCallError(Exception):
    """The text is not a tool call in the format. The parsers always catch this error."""


@lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def held_back(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of `text` can be the start of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for size in range(longest, 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


class Cursor:
    """A position in a text that arrives in pieces. No marker may be a prefix of another one."""

    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._at = 0
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        """Append the next piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def record(self, before: str) -> None:
        """Start recording the text that is read. before: the text that was just read."""
        self._recorded = [before]

    def stop_recording(self) -> str | None:
        """Return the recorded text and stop, or None if nothing was being recorded."""
        recorded, self._recorded = self._recorded, None
        return None if recorded is None else "".join(recorded)

    def take(self, size: int) -> str:
        """Read characters that have arrived."""
        piece = self._text[self._at : self._at + size]
        self._at += size
        if self._recorded is not None:
            self._recorded.append(piece)
        return piece

    def peek(self) -> Steps[str]:
        """Return the next character without reading it. "" at the end."""
        while self._at >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def accept(self, text: str) -> Steps[bool]:
        """Read `text` if it is next. Return whether it was."""
        while True:
            rest = self._text[self._at : self._at + len(text)]
            if rest == text:
                self.take(len(text))
                return True
            if self.ended or not text.startswith(rest):
                return False
            yield

    def expect(self, text: str) -> Steps[None]:
        """Read `text`. Raise MalformedCallError if it is not next."""
        if not (yield from self.accept(text)):
            raise MalformedCallError

    def skip_space(self) -> Steps[str]:
        """Read white space. Return the next character, "" at the end."""
        while True:
            char = yield from self.peek()
            if not char or char not in _SPACE:
                return char
            self.take(1)

    def until(self, markers: tuple[str, ...], emit: Emit) -> Steps[str]:
        """Pass on the text before the first marker. Read and return the marker, "" at the end."""
        pattern = _any_of(markers)
        while True:
            match = pattern.search(self._text, self._at)
            if match is not None:
                self._pass_on(match.start(), emit)
                return self.take(len(match[0]))
            rest = self._text[self._at :]
            held = 0 if self.ended else held_back(rest, markers)
            self._pass_on(len(self._text) - held, emit)
            if self.ended:
                return ""
            yield

    def word(self, stops: tuple[str, ...], maximum: int = MAX_NAME_CHARS) -> Steps[tuple[str, str]]:
        """Read a short text and the marker after it. Raise MalformedCallError if there is none."""
        parts: list[str] = []
        size = 0

        def keep(piece: str) -> None:
            nonlocal size
            size += len(piece)
            parts.append(piece)
            if size > maximum:
                raise MalformedCallError

        marker = yield from self.until(stops, keep)
        if not marker:
            raise MalformedCallError
        return "".join(parts), marker

    def json_value(self, emit: Emit) -> Steps[None]:
        """Pass on the text of the JSON value that is next.

        Raises MalformedCallError if no value is next, or if the text ends inside of it.
        """
        first = yield from self.skip_space()
        if first == '"':
            emit(self.take(1))
            yield from self._string(emit)
        elif first and first in "{[":
            yield from self._nested(emit)
        else:
            yield from self._scalar(emit)

    def rest_of_object(self, emit: Emit) -> Steps[None]:
        """Pass on the rest of a JSON object whose opening brace was read."""
        yield from self._nested(emit, depth=1)

    def rest(self, emit: Emit) -> Steps[None]:
        """Forward everything that follows."""
        while (yield from self.peek()):
            self._pass_on(len(self._text), emit)

    def _pass_on(self, end: int, emit: Emit) -> None:
        if end > self._at:
            emit(self.take(end - self._at))

    def _string(self, emit: Emit) -> Steps[None]:
        """Pass on the rest of a string, with the closing quote."""
        while char := (yield from self.peek()):
            if char == '"':
                emit(self.take(1))
                return
            if char == "\\":
                emit(self.take(1))
                if not (yield from self.peek()):
                    break
                emit(self.take(1))
            elif match := _IN_STRING.match(self._text, self._at):
                emit(self.take(len(match[0])))
        raise MalformedCallError

    def _nested(self, emit: Emit, depth: int = 0) -> Steps[None]:
        while char := (yield from self.peek()):
            if char == '"':
                emit(self.take(1))
                yield from self._string(emit)
            elif match := _OUTSIDE.match(self._text, self._at):
                emit(self.take(len(match[0])))
            else:
                emit(self.take(1))
                depth += 1 if char in "{[" else -1
                if depth == 0:
                    return
        raise MalformedCallError

    def _scalar(self, emit: Emit) -> Steps[None]:
        taken = ""
        while (char := (yield from self.peek())) and char not in _SCALAR_END:
            taken += self.take(1)
            if len(taken) > _MAX_SCALAR_CHARS:
                raise MalformedCallError
        if not re.fullmatch(r"true|false|null|-?\d+(\.\d+)?([eE][+-]?\d+)?", taken):
            raise MalformedCallError
        emit(taken)

"""Reads the lines of a batch file, with a limit for the length of a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

MAX_LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line that is not blank. number: its number in the file, from 1.

    text: None if it is too long.
    """

    number: int
    text: bytes | None


def read_lines(file: BinaryIO, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[InputLine]:
    """Yield the lines that are not blank. Blocks. Skip the text of lines that are too long."""
    number = 0
    while text := file.readline(max_line_bytes + 1):
        number += 1
        if len(text) > max_line_bytes:
            _skip_rest(file, text, max_line_bytes)
            yield InputLine(number, None)
        elif not text.isspace():
            yield InputLine(number, text)


def _skip_rest(file: BinaryIO, text: bytes, max_line_bytes: int) -> None:
    while text and not text.endswith(b"\n"):
        text = file.readline(max_line_bytes)

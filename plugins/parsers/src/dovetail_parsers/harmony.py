"""The messages of harmony, the format of gpt-oss: a header, <|message|>, and a body."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail_parsers.cursor import Cursor, MalformedCallError, Steps

STARTS = ("<|start|>", "<|channel|>")
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MESSAGE = "<|message|>"
_MAX_HEADER_CHARS = 512


@dataclass(frozen=True)
class Header:
    """channel: such as "analysis"; "" for none. function: the called function; "" for none."""

    channel: str
    function: str


def read_header(cursor: Cursor, marker: str) -> Steps[Header | None]:
    """Read a header up to <|message|>, or None if there is none. marker: its first marker."""
    try:
        text, _ = yield from cursor.word((_MESSAGE,), _MAX_HEADER_CHARS)
    except MalformedCallError:
        return None
    text = marker + text
    channel = re.search(r"<\|channel\|>\s*(\w+)", text)
    function = re.search(r"\bto=functions\.([\w-]+)", text)
    return Header(channel[1] if channel else "", function[1] if function else "")

"""What a person types in a chat: messages over one or several lines.

A line that ends with a backslash goes on in the next; a line that begins with three quotation marks
opens a block that three others close. Knows no conversation and no command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

PROMPT = "> "
MORE = ". "
QUOTES = '"""'

Ask = Callable[[str], str]
"""Takes a prompt and returns a line without its end; raises EOFError where there is no more."""


def keyboard() -> Ask:
    """Return how to read lines from stdin: with line editing and prompts if it is a terminal."""
    if not sys.stdin.isatty():
        return lambda prompt: input()
    import readline  # line editing and history; `input` finds it by its import

    readline.set_history_length(1000)
    return input


def read_message(ask: Ask) -> str:
    """Return the next message; raise EOFError where there is none.

    An end of input within a message ends that message.
    """
    text = ask(PROMPT)
    try:
        if text.lstrip().startswith(QUOTES):
            return _read_block(text.lstrip()[len(QUOTES) :], ask)
        while text.endswith("\\"):
            text = f"{text[:-1]}\n"
            text += ask(MORE)
    except EOFError:
        return text.rstrip("\n")
    return text


def _read_block(text: str, ask: Ask) -> str:
    try:
        while not text.rstrip().endswith(QUOTES):
            text += "\n"
            text += ask(MORE)
    except EOFError:
        return text.strip("\n")
    return text.rstrip()[: -len(QUOTES)].strip("\n")

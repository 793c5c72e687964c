"""What is the same for every command that writes a model's text to a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {code: 0xFFFD for code in range(127, 160)}


def printable(text: str) -> str:
    """Return `text` with control characters made visible: a model must not steer a terminal."""
    return text.translate(_CONTROLS)


def forgive_encodings() -> None:
    """Let the standard streams replace what their encoding lacks, instead of failing."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def tell(message: str) -> None:
    """Write a remark to stderr, where it cannot be mistaken for an answer."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress_note() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows on stderr what is being done; silent where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update

"""Input and output of commands: standard streams, downloads, messages, text files.

If a line of a message ends with a backslash, the message continues on the next line. Three
quotation marks at the start of a message open a block of lines, and three more close it.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size

from dovetail.errors import ConfigError

MAX_FILE_BYTES = 2**28
"""Maximum size of a file with prompts in bytes, or of standard input in characters."""

PROMPT = "> "
MORE = ". "
QUOTES = '"""'

DOWNLOADS = "dovetail.downloads"
"""The logger that receives the progress of downloads (`dovetail.config.model_sources`)."""
_REPLACE_LINE = "\x1b[1A\x1b[K"
"""Control sequence that moves the cursor to the start of the previous line and clears that line."""

Ask = Callable[[str], str]
"""Prints a prompt and returns the next line without its newline. Raises EOFError at the end of the
input."""

_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_CONTROLS |= {code: 0xFFFD for code in range(127, 160)}


def printable(text: str) -> str:
    """Return `text` with control characters escaped, so that a model cannot control a terminal."""
    return text.translate(_CONTROLS)


def count_text(number: int, noun: str) -> str:
    """Return a number with a noun: "1 line", "1,000 lines"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def prepare_streams() -> None:
    """Make the standard streams usable by all commands.

    Standard output replaces characters that it cannot encode, such as those of a path that is not
    UTF-8. A stream that the caller has closed (`>&-`) is empty, or discards its output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def discard_stdout() -> None:
    """Discard the output that could not be written, which Python would write again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def replace_unencodable() -> None:
    """Make the standard streams replace characters that cannot be encoded or decoded."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def print_message(message: str) -> None:
    """Write a message to stderr, separate from responses."""
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)


@contextmanager
def progress_note() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update


@contextmanager
def show_downloads() -> Iterator[None]:
    """Show the latest line of progress on a terminal. Print only the first line elsewhere."""
    logger = logging.getLogger(DOWNLOADS)
    before, display = logger.level, _Display()
    logger.addHandler(display)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(display)
        logger.setLevel(before)


class _Display(logging.Handler):
    """Writes log records to stderr."""

    def __init__(self) -> None:
        super().__init__()
        self._num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line of progress."""
        line, stream = record.getMessage(), sys.stderr
        self._num_lines += 1
        if stream.isatty():
            shown = "".join(c if c.isprintable() else "?" for c in line)
            start = _REPLACE_LINE if self._num_lines > 1 else ""
            print(f"{start}{shown[: get_terminal_size().columns - 1]}", file=stream, flush=True)
        elif self._num_lines == 1:
            print(line, file=stream, flush=True)


def keyboard() -> Ask:
    """Return a function that reads a line from stdin, with line editing if it is a terminal."""
    if not sys.stdin.isatty():
        return lambda prompt: input()
    import readline  # the import enables line editing and history in `input`

    readline.set_history_length(1000)
    return input


def read_message(ask: Ask) -> str:
    """Return the next message. Raise EOFError if there is none.

    The end of the input also ends a message.
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


def read_text_file(option: str, file: str | Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the UTF-8 text of a file, or of standard input for "-".

    Raises ConfigError, with the option's name, if the text cannot be read or is larger than
    `max_bytes`. Never reads more than one byte above the limit, because a device may be endless.
    """
    try:
        text = _read_file(file, max_bytes)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{option} {file} cannot be read: byte {error.start} is not UTF-8. Specify a text file."
        ) from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ConfigError(f"{option} {file} cannot be read: {reason}.") from None
    if text is None:
        raise ConfigError(f"{option} {file} has more than {max_bytes} bytes; use a smaller file.")
    return text


def _read_file(file: str | Path, max_bytes: int) -> str | None:
    if str(file) == "-":
        text = sys.stdin.read(max_bytes + 1)
        return text if len(text) <= max_bytes else None
    with open(os.path.expanduser(file), "rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        return None
    return content.decode("utf-8").replace("\r\n", "\n")

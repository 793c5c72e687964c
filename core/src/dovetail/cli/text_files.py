"""Reads the text files that options name, up to a size."""

from __future__ import annotations

import sys
from pathlib import Path

from dovetail.errors import ConfigError

MAX_BYTES = 2**28
"""Bytes of a file of prompts; of standard input as many characters."""


def read_text_file(option: str, file: str | Path, *, max_bytes: int = MAX_BYTES) -> str:
    """Return the UTF-8 text of a file, or of standard input for "-".

    Raises ConfigError, naming the option, for what cannot be read or is larger than `max_bytes`,
    of which no more is read: a device may never end.
    """
    try:
        text = _read(file, max_bytes)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option} {file} cannot be read: {error}.") from None
    if text is None:
        raise ConfigError(f"{option} {file} has more than {max_bytes} bytes; give a smaller file.")
    return text


def _read(file: str | Path, max_bytes: int) -> str | None:
    if str(file) == "-":
        text = sys.stdin.read(max_bytes + 1)
        return text if len(text) <= max_bytes else None
    with Path(file).expanduser().open("rb") as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        return None
    return content.decode("utf-8").replace("\r\n", "\n")

"""The input file of a batch, with limits for the number of lines and bytes."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from dovetail.errors import ConfigError
from dovetail_server.batches.line_reader import MAX_LINE_BYTES, InputLine, read_lines

MAX_LINES = 1_000_000
MAX_FILE_BYTES = 64 << 30


class InputFile:
    """The input file of a batch. num_lines: number of lines that are not blank.

    Raises ConfigError if the file cannot be read or is too large.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}.") from None
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{str(path)!r} is not a regular file. Use a file of JSON lines.")
        if status.st_size > MAX_FILE_BYTES:
            raise ConfigError(
                f"{str(path)!r} has {status.st_size:,} bytes; at most {MAX_FILE_BYTES:,} are "
                "accepted. Split the file."
            )
        self.num_lines = sum(1 for _ in self.lines())
        if self.num_lines > MAX_LINES:
            raise ConfigError(
                f"{str(path)!r} has {self.num_lines:,} lines; at most {MAX_LINES:,} are accepted. "
                "Split the file."
            )
        if not self.num_lines:
            raise ConfigError(f"{str(path)!r} has no lines. Write one request per line.")

    def lines(self) -> Iterator[InputLine]:
        """Yield the lines that are not blank."""
        try:
            with self._path.open("rb") as file:
                yield from read_lines(file, MAX_LINE_BYTES)
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be read: {error.strerror}.") from None

"""Reads the lines of a text file, plain or compressed, in bounded memory."""

from __future__ import annotations

import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

from dovetail_lab.workloads.readers.trace_row import TraceError

MAX_LINE_BYTES = 2**22
"""Longer lines are rejected."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without its newline); empty lines are skipped.

    Files that end in .gz or .xz are decompressed. Raises TraceError if the file cannot be read, is
    not UTF-8 or has a line of more than `MAX_LINE_BYTES`.
    """
    number = 0
    try:
        with _open(path) as stream:
            for number, raw in enumerate(_bounded_lines(stream), start=1):
                yield from _text_of(path, number, raw)
    except (lzma.LZMAError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        message = f"the compressed file is damaged: {error}."
        raise TraceError(str(path), number, message) from error
    except OSError as error:
        message = f"the file cannot be read: {error.strerror or error}."
        raise TraceError(str(path), 0, message) from error


def read_table(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield (line number, fields by column name) for each row of a CSV file with a header.

    columns: names that the header must contain. Raises TraceError for a missing column or a row of
    a different width. Fields cannot contain line breaks.
    """
    header: list[str] | None = None
    for number, text in read_lines(path):
        try:
            fields = next(csv.reader([text], strict=True))
        except csv.Error as error:
            raise TraceError(str(path), number, f"the line is not CSV: {error}.") from error
        if header is None:
            header = [name.strip() for name in fields]
            missing = [name for name in columns if name not in header]
            if missing:
                raise TraceError(str(path), number, f"the header has no column {missing[0]!r}.")
            continue
        if len(fields) != len(header):
            message = f"the row has {len(fields)} fields; the header has {len(header)}."
            raise TraceError(str(path), number, message)
        yield number, dict(zip(header, fields, strict=True))


def read_objects(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (line number, object) for each line of a JSON Lines file."""
    for number, text in read_lines(path):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(str(path), number, f"the line is not JSON: {error}.") from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise TraceError(str(path), number, f"expected a JSON object, got {kind}.")
        yield number, value


def first_line(path: Path) -> str:
    """Return the first line that is not empty, or ""."""
    return next((text for _, text in read_lines(path)), "")


def _bounded_lines(stream: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b"")


def _text_of(path: Path, number: int, raw: bytes) -> Iterator[tuple[int, str]]:
    """Yield (line number, text), or nothing for an empty line."""
    if len(raw) > MAX_LINE_BYTES:
        raise TraceError(str(path), number, f"the line is longer than {MAX_LINE_BYTES:,} bytes.")
    try:
        text = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise TraceError(str(path), number, "the line is not UTF-8 text.") from error
    if text.strip():
        yield number, text


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    return path.open("rb")

"""The file format of a decision log: a magic line, then framed records.

A frame is its kind (uint8), the length of its body (uint32), the body's CRC-32 (uint32), all
little-endian, and the body, which is the payload compressed by zlib. A truncated log is read up to
its last complete record.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import BinaryIO

from dovetail.errors import ConfigError, UserError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
_MAGIC = b"dovetail decisions %d\n"
_FRAME = Struct("<BII")
_LEVEL = 1  # the compression level; repetitive data compresses well at any level


class RecordKind(IntEnum):
    """The type of a record."""

    HEADER = 0
    ADD = 1
    ABORT = 2
    PAUSE = 3
    RESUME = 4
    RESET_PREFIX_CACHE = 5
    PLAN = 6
    OUTPUT = 7


_KINDS = frozenset(RecordKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record.

    payload: clock readings, then the content as defined in `encoding` or `plan_records`.
    """

    kind: RecordKind
    payload: bytes


class LogWriter:
    """Appends records to a new file. A write error ends the log, but not the engine."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO | None = path.open("xb")
        except OSError as error:
            raise ConfigError(
                f"decision_log={str(path)!r} cannot be written: {error.strerror}; name a new file, "
                "in an existing directory with write permission."
            ) from error
        self._path = path
        self._file.write(_MAGIC % FORMAT_VERSION)

    def append(self, kind: RecordKind, payload: bytes) -> None:
        """Write one record and flush it."""
        if self._file is None:
            return
        body = zlib.compress(payload, _LEVEL)
        try:
            self._file.write(_FRAME.pack(kind, len(body), zlib.crc32(body)))
            self._file.write(body)
            self._file.flush()
        except OSError as error:
            self._file = None
            logger.warning(
                "Recording to the decision log %s has stopped: %s.", self._path, error.strerror
            )

    def close(self) -> None:
        """Close the file. May be called more than once."""
        if self._file is not None:
            self._file.close()
            self._file = None


class LogReader:
    """Iterates over the records of a log.

    truncated: after the end was reached, whether the last record is incomplete.
    Raises UserError if the file is not a decision log, or one of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = False
        try:
            self._content = path.read_bytes()
        except OSError as error:
            raise UserError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
        first, _, _ = self._content[:64].partition(b"\n")
        if first + b"\n" != _MAGIC % FORMAT_VERSION:
            raise UserError(
                f"{str(path)!r} is not a decision log of version {FORMAT_VERSION}: it begins with "
                f"{first[:32]!r}."
            )
        self._start = len(first) + 1

    def __iter__(self) -> Iterator[Record]:
        content, position = memoryview(self._content), self._start
        while position < len(content):
            begin = position + _FRAME.size
            if begin > len(content):
                break
            kind, length, crc = _FRAME.unpack(content[position:begin])
            if begin + length > len(content):
                break
            body = content[begin : begin + length]
            if zlib.crc32(body) != crc or kind not in _KINDS:
                raise UserError(
                    f"{str(self.path)!r} is damaged at byte {position}: there is no valid record. "
                    "The records before it are valid."
                )
            yield Record(kind=RecordKind(kind), payload=zlib.decompress(body))
            position = begin + length
        self.truncated = position < len(content)

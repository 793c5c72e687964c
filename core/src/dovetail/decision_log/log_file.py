"""The file format of a decision log: a magic line, then framed records.

A frame is its kind (uint8), the length of its body (uint32), the body's CRC-32 (uint32), all
little-endian, and the body, which is the payload compressed by zlib. A truncated log is read up to
its last complete record.
"""

from __future__ import annotations

import logging
import os
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
MAX_PAYLOAD_BYTES = 1 << 28
"""Maximum size of a record. A prompt of a million tokens needs less than a tenth of it."""
_MAX_MAGIC_BYTES = 64
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
    """A record of a decision log.

    payload: clock readings, then the content as defined in `encoding` or `plan_records`.
    """

    kind: RecordKind
    payload: bytes


class LogWriter:
    """Appends records to a new file. After a write error the engine continues without the log."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: BinaryIO | None = path.open("xb")
        except OSError as error:
            raise ConfigError(
                f"decision_log={str(path)!r} cannot be written: {error.strerror}; specify a new "
                "file in a writable directory."
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
    """Iterates over the records of a log. At any time, only one record is in memory.

    truncated: after the end was reached, whether the last record is incomplete.
    Raises UserError if the file is not a decision log, or one of a different version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = False
        with self._open() as file:
            first, _, _ = file.read(_MAX_MAGIC_BYTES).partition(b"\n")
        if first + b"\n" != _MAGIC % FORMAT_VERSION:
            reason = f"it begins with {first[:16]!r}" if first else "it is empty"
            raise UserError(
                f"{str(path)!r} is not a decision log of version {FORMAT_VERSION}: {reason}."
            )
        self._start = len(first) + 1

    def __iter__(self) -> Iterator[Record]:
        with self._open() as file:
            size = os.fstat(file.fileno()).st_size
            position = file.seek(self._start)
            while position < size:
                head = file.read(_FRAME.size)
                if len(head) < _FRAME.size:
                    break
                kind, length, crc = _FRAME.unpack(head)
                if position + len(head) + length > size:
                    break
                body = file.read(length)
                if zlib.crc32(body) != crc or kind not in _KINDS:
                    raise self._damaged(position, "there is no valid record")
                yield Record(kind=RecordKind(kind), payload=self._decompress(body, position))
                position += len(head) + length
            self.truncated = position < size

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise UserError(f"{str(self.path)!r} cannot be read: {error.strerror}.") from error

    def _decompress(self, body: bytes, position: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            payload = stream.decompress(body, MAX_PAYLOAD_BYTES)
        except zlib.error:
            raise self._damaged(position, "the record cannot be decompressed") from None
        if not stream.eof:
            limit = f"or has more than {MAX_PAYLOAD_BYTES:,} bytes"
            raise self._damaged(position, f"the record is incomplete, {limit}")
        return payload

    def _damaged(self, position: int, reason: str) -> UserError:
        return UserError(
            f"{str(self.path)!r} is damaged at byte {position}: {reason}. "
            "The records before it are valid."
        )

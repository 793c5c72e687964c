"""The file with the records of a batch. A resumed run appends to it."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec

from dovetail.errors import ConfigError

RECORD_PREFIX = "batch_req_"
MAX_RECORD_BYTES = 64 << 20
Mode = Literal["new", "resume", "overwrite"]


class _Response(msgspec.Struct):
    status_code: int = 0


class _Record(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None = None


_DECODER = msgspec.json.Decoder(_Record)


def record_id(number: int) -> str:
    """Return the id of the record for the line with this number."""
    return f"{RECORD_PREFIX}{number}"


class OutputFile:
    """An output file, locked until `close`.

    mode: "new" for a file that must be new or empty, "resume" to continue it, "overwrite" to delete
    its content. done: the custom_id of each executed line by the line's number. num_failed: records
    without a successful response. Raises ConfigError if the file cannot be used.
    """

    def __init__(self, path: Path, mode: Mode) -> None:
        self._path = path
        self.done: dict[int, str] = {}
        self.num_failed = 0
        self._file = self._open()
        try:
            self._lock()
            self._prepare(mode)
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> BinaryIO:
        try:
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be opened: {error.strerror}.") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise ConfigError(f"{str(self._path)!r} is not a regular file.")
        return file

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"Another process is writing to {str(self._path)!r}.") from None

    def _prepare(self, mode: Mode) -> None:
        if mode == "overwrite":
            self._file.truncate(0)
        elif mode == "resume":
            self._file.truncate(self._read_records())
        elif os.fstat(self._file.fileno()).st_size:
            raise ConfigError(
                f"{str(self._path)!r} exists. Continue it with --resume, or delete its content "
                "with --overwrite."
            )
        self._file.seek(0, os.SEEK_END)

    def _read_records(self) -> int:
        """Store the records of an earlier run. Return where the last complete one ends."""
        end = number = 0
        while line := self._file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            if not line.endswith(b"\n"):
                if len(line) > MAX_RECORD_BYTES:
                    raise self._not_records(number)
                break  # the earlier run ended while it wrote this record
            self._add(line, number)
            end += len(line)
        return end

    def _add(self, line: bytes, number: int) -> None:
        try:
            record = _DECODER.decode(line)
            line_number = int(record.id.removeprefix(RECORD_PREFIX))
        except (msgspec.DecodeError, ValueError, RecursionError):
            raise self._not_records(number) from None
        self.done[line_number] = record.custom_id
        self.num_failed += record.response is None or record.response.status_code != 200

    def _not_records(self, number: int) -> ConfigError:
        return ConfigError(
            f"Line {number} of {str(self._path)!r} is not a record of run-batch, so the run cannot "
            "continue. Use another output file."
        )

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record, so that a killed run loses only the lines in progress."""
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
            self._file.flush()
        except OSError as error:
            raise ConfigError(f"{str(self._path)!r} cannot be written: {error.strerror}.") from None

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()

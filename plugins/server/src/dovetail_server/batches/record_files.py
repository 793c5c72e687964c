"""The output file and the error file of a batch that is being executed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from dovetail_server.batches.batch import LineCounts
from dovetail_server.batches.lines import is_success
from dovetail_server.protocol.errors import APIError
from dovetail_server.storage.database import storage_failed

ID_PREFIX = "batch_req_"


class _Record(msgspec.Struct):
    id: str
    custom_id: str


_DECODER = msgspec.json.Decoder(_Record)


def record_id(batch_id: str, number: int) -> str:
    """Return the id of the record for the line with this number."""
    return f"{ID_PREFIX}{batch_id.removeprefix('batch_')}_{number}"


class RecordFiles:
    """Writes each record to one of two files.

    done: maps the number of each recorded line to its custom_id.

    Blocks, and may be used by several threads.
    """

    def __init__(self, output: BinaryIO, errors: BinaryIO, counts: LineCounts) -> None:
        """Continue the files of an earlier process, and count their records in `counts`."""
        self.done: dict[int, str] = {}
        self._output = output
        self._errors = errors
        self._counts = counts
        self._lock = threading.Lock()
        counts.completed = self._read(output)
        counts.failed = self._read(errors)

    def write(self, number: int, record: dict[str, Any]) -> None:
        """Append the record of a line. Raise APIError if the disk fails.

        Does nothing if the line already has a record.
        """
        text, succeeded = msgspec.json.encode(record) + b"\n", is_success(record)
        with self._lock:
            if number in self.done:
                return
            try:
                file = self._output if succeeded else self._errors
                file.write(text)
                file.flush()
            except OSError as error:
                raise storage_failed(error) from None
            self.done[number] = record["custom_id"]
            if succeeded:
                self._counts.completed += 1
            else:
                self._counts.failed += 1

    def sizes(self) -> tuple[int, int]:
        """Return the sizes of the two files, in bytes."""
        return self._output.tell(), self._errors.tell()

    def close(self) -> None:
        """Write the files to the disk and close them."""
        with self._lock:
            for file in (self._output, self._errors):
                if not file.closed:
                    os.fsync(file.fileno())
                    file.close()

    def _read(self, file: BinaryIO) -> int:
        """Read the records of an earlier process.

        Return their number, and remove an incomplete record.
        """
        file.seek(0)
        count = end = 0
        for line in file:
            try:
                record = _DECODER.decode(line)
                number = int(record.id.rpartition("_")[2])
            except (msgspec.DecodeError, ValueError):
                break
            if not line.endswith(b"\n"):
                break
            self.done[number] = record.custom_id
            count += 1
            end += len(line)
        file.truncate(end)
        file.seek(end)
        return count


def open_input(path: Path) -> BinaryIO:
    """Open the input file of a batch. Raise APIError if it has been deleted."""
    try:
        return path.open("rb")
    except OSError:
        raise APIError(
            "The input file has been deleted.", code="file_not_found", param="input_file_id"
        ) from None

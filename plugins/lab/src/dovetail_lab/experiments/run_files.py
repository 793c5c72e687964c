"""Stores runs in a folder: a JSON file with metrics, and a file with the columns of requests."""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dovetail.errors import UserError
from dovetail_lab.experiments.run_key import RunKey
from dovetail_lab.simulation.results import RequestColumns, StepColumns

_VERSION = 1
_HEADER = b"dovetail lab columns %d\n" % _VERSION


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One stored run.

    status: "ok" or "failed". error: why it failed. values, classes, num_*: see `RunMetrics`.
    workload: its name and counts. host_s: wall time of the run. facts: totals such as the number of
    steps and the rate of completions.
    """

    run_id: str
    key: RunKey
    status: str
    error: str = ""
    values: Mapping[str, float | None] = field(default_factory=dict)
    classes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_measured: int = 0
    num_censored: int = 0
    num_failed: int = 0
    workload: Mapping[str, Any] = field(default_factory=dict)
    host_s: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the run is complete."""
        return self.status == "ok"


class RunFolder:
    """The files of an experiment's runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, record: RunRecord) -> None:
        """Write a record. An existing record is replaced atomically."""
        plain = {
            item.name: getattr(record, item.name) for item in fields(record) if item.name != "key"
        }
        text = json.dumps({"version": _VERSION, **plain, "key": record.key.plain()}, indent=1)
        _replace(self.folder / f"{record.run_id}.json", text.encode())

    def read(self, run_id: str) -> RunRecord | None:
        """Return a record; None if it is missing or incomplete after an interruption."""
        try:
            output = json.loads((self.folder / f"{run_id}.json").read_text("utf-8"))
            if output.pop("version") != _VERSION:
                return None
            return RunRecord(key=RunKey(**output.pop("key")), **output)
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write_columns(
        self, run_id: str, requests: RequestColumns, steps: StepColumns | None
    ) -> None:
        """Write the columns of a run."""
        header: dict[str, dict[str, int]] = {}
        parts: list[bytes] = []
        for name, table in (("requests", requests), ("steps", steps)):
            if table is not None:
                header[name] = {}
                for item in fields(table):
                    column: array[int] = getattr(table, item.name)
                    header[name][item.name] = len(column)
                    parts.append(column.tobytes())
        body = json.dumps(header).encode() + b"\n" + b"".join(parts)
        _replace(self.folder / f"{run_id}.columns", _HEADER + zlib.compress(body, 1))

    def read_columns(self, run_id: str) -> tuple[RequestColumns, StepColumns | None]:
        """Return the columns of a run; raise UserError if they are missing or damaged."""
        path = self.folder / f"{run_id}.columns"
        try:
            content = path.read_bytes()
            if not content.startswith(_HEADER):
                raise ValueError("unknown version")
            header, _, body = zlib.decompress(content[len(_HEADER) :]).partition(b"\n")
            tables = _decode(json.loads(header), memoryview(body))
        except (OSError, ValueError, zlib.error, KeyError, TypeError) as error:
            raise UserError(f"{str(path)!r} cannot be read: {error}.") from error
        steps = StepColumns(**tables["steps"]) if "steps" in tables else None
        return RequestColumns(**tables["requests"]), steps


def _decode(header: Mapping[str, Mapping[str, int]], body: memoryview) -> dict[str, dict[str, Any]]:
    position = 0
    tables: dict[str, dict[str, Any]] = {}
    for name, columns in header.items():
        tables[name] = {}
        for column, length in columns.items():
            values = array("q")
            end = position + length * values.itemsize
            if end > len(body):
                raise ValueError("the file is truncated")
            values.frombytes(body[position:end])
            tables[name][column] = values
            position = end
    return tables


def _replace(path: Path, content: bytes) -> None:
    """Replace a file atomically: readers see either the old or the new content."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise

"""The report of a section: metrics, counts and failures, written to disk immediately.

The section's process writes it and the check reads it, so that a section that hangs or crashes
keeps its results. Standard library only.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu.device_parts import PARTS, DeviceParts

OK = "ok"
FAILED = "failed"
"""The section ran and found a failure."""
BROKEN = "broken"
"""The section raised an exception."""
DIED = "died"
LATE = "timed out"
NO_DEVICE = "needs a GPU"
LACKS = "lacks a package"
NEVER = "never run"

_NUM_LINES = 8
_NUM_FRAMES = 3


class NeedsDeviceError(Exception):
    """The section does not apply to the available device. The message gives the reason."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The arguments of a section.

    device: the name of a device in `PARTS`. small: use sizes for a few seconds on a CPU. folder: an
    empty directory. seed: seed of all random numbers. deadline_s: when its process is killed.
    """

    device: str
    small: bool
    folder: Path
    seed: int
    deadline_s: float = 600.0

    @property
    def parts(self) -> DeviceParts:
        """Return the plugins for the device."""
        return PARTS[self.device]


@dataclass(kw_only=True)
class Report:
    """The results of a section. Every change is written to `file` immediately."""

    file: Path
    metrics: list[dict[str, Any]] = field(default_factory=list)
    plugins: dict[str, dict[str, int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def metric(self, name: str, value: float, *, unit: str = "", note: str = "") -> None:
        """Add a metric. unit: only for metrics that the catalog does not list. note: a remark."""
        self.metrics.append({"name": name, "value": value, "unit": unit, "note": note})
        self._write()

    def plugin(self, name: str, counts: Mapping[str, int]) -> None:
        """Add the numbers of passed, failed and skipped cases of "kind:name"."""
        self.plugins[name] = dict(counts)
        self._write()

    def fact(self, name: str, value: Any) -> None:
        """Add information that is not a result."""
        self.facts[name] = value
        self._write()

    def fail(self, text: str) -> None:
        """Record a failure. The section continues."""
        self.wrong.append(text)
        self._write()

    def note(self, text: str) -> None:
        """Add a remark."""
        self.notes.append(text)
        self._write()

    def _write(self) -> None:
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "file"}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(parts), encoding="utf-8")
        part.replace(self.file)


def describe_error(error: Exception) -> str:
    """Return the message of an error in a few lines, and the code location that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    locations = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return "\n".join([*lines[:_NUM_LINES], *locations])


def read_report(file: Path) -> dict[str, Any]:
    """Return the content of a report. Its lists and tables are empty if the file does not exist."""
    if file.is_file():
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return result
    return {"metrics": [], "plugins": {}, "facts": {}, "wrong": [], "notes": []}

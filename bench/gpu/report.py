"""A section's report: figures, counts and complaints, on disk as soon as they are known.

Written by the section's own process, read by the check, so that a section that hangs or dies
leaves what it had found. Standard library only.
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
"""It ran, and something is wrong."""
BROKEN = "broken"
"""It raised."""
DIED = "died"
LATE = "timed out"
NO_DEVICE = "needs a GPU"
LACKS = "lacks a package"
NEVER = "never run"

_NUM_LINES = 8
_NUM_FRAMES = 3


class NeedsDeviceError(Exception):
    """What is asked has no meaning on the device available; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a section is given.

    device: its type, as torch is told it. small: a few seconds on a CPU are all there is. folder:
    for files; empty at first. seed: of everything random.
    """

    device: str
    small: bool
    folder: Path
    seed: int

    @property
    def parts(self) -> DeviceParts:
        """What has to do with the device."""
        return PARTS[self.device]


@dataclass(kw_only=True)
class Report:
    """What a section found. Every change is written to `file` at once."""

    file: Path
    figures: list[dict[str, Any]] = field(default_factory=list)
    plugins: dict[str, dict[str, int]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def figure(self, name: str, value: float, *, unit: str = "", note: str = "") -> None:
        """Add a number. unit, note: for one that the catalogue does not know."""
        self.figures.append({"name": name, "value": value, "unit": unit, "note": note})
        self._write()

    def plugin(self, name: str, counts: Mapping[str, int]) -> None:
        """Add how many cases of "kind:name" passed, failed and were skipped."""
        self.plugins[name] = dict(counts)
        self._write()

    def fact(self, name: str, value: Any) -> None:
        """Add something that is good to know and is not a result."""
        self.facts[name] = value
        self._write()

    def fail(self, text: str) -> None:
        """Say that something is wrong; the section continues."""
        self.wrong.append(text)
        self._write()

    def note(self, text: str) -> None:
        """Say something that is neither right nor wrong."""
        self.notes.append(text)
        self._write()

    def _write(self) -> None:
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "file"}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(parts), encoding="utf-8")
        part.replace(self.file)


def describe_error(error: Exception) -> str:
    """Return what an error says, in a few lines, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)[-_NUM_FRAMES:]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in frames]
    told = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return "\n".join([*told[:_NUM_LINES], *places])


def read_report(file: Path) -> dict[str, Any]:
    """Return what a report holds; empty lists and tables where nothing was written."""
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    return {"figures": [], "plugins": {}, "facts": {}, "wrong": [], "notes": []}

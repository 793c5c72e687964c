"""Writes a trace as one HTML file, which needs no other file and makes no request.

The scripts of the page are fixed; the trace is a data block, which a browser never executes. The
content security policy allows only this script and this style, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from dovetail_client_tools.engine_steps.reader import one_line
from dovetail_client_tools.engine_steps.records import Step
from dovetail_client_tools.trace.slices import KINDS, Ended, Slice

MAX_STEPS = 50_000
MAX_SLICES = 200_000
MAX_REQUESTS = 20_000
"""Limits of one page: a browser shows it without delay, and the file has at most about 16 MB."""
_UNITS_NS = 1000
_UNKNOWN = -1


class ViewerPage:
    """A sink that keeps the first part of a trace, up to the limits. Times are microseconds.

    is_complete: whether nothing was omitted. num_steps: steps on the page.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self._begin_ns: int | None = None
        self._steps = {name: array("q") for name in _STEP_COLUMNS}
        self._slices = {name: array("q") for name in _SLICE_COLUMNS}
        self._requests: dict[int, list[Any]] = {}

    @property
    def num_steps(self) -> int:
        """Number of steps on the page."""
        return len(self._steps["begin"])

    def add_request(self, number: int, name: str, num_prompt: int | None) -> None:
        """Add a row."""
        if self._has_space(self._requests, MAX_REQUESTS):
            prompt = _UNKNOWN if num_prompt is None else num_prompt
            self._requests[number] = [number, one_line(name), prompt, "", _UNKNOWN]

    def add_slice(self, item: Slice) -> None:
        """Add a slice of a request that has a row."""
        if item.request in self._requests and self._has_space(self._slices["begin"], MAX_SLICES):
            duration = (item.end_ns - item.begin_ns) // _UNITS_NS
            values = (item.request, KINDS.index(item.kind), self._time(item.begin_ns), duration)
            _append(self._slices, (*values, item.num_steps, item.num_tokens))

    def add_ended(self, item: Ended) -> None:
        """Set the end of a request."""
        row = self._requests.get(item.request)
        if row is not None:
            row[3:] = [one_line(item.reason, 20), self._time(item.time_ns)]

    def add_step(self, step: Step, lane: int) -> None:
        """Add a step."""
        if not self._has_space(self._steps["begin"], MAX_STEPS):
            return
        prefill = step.num_prefill_tokens
        tokens = (prefill, max(0, step.num_tokens - prefill))
        times = (self._time(step.begin_ns), step.duration_ns // _UNITS_NS)
        counts = (step.num_running, step.num_waiting, step.num_used_blocks)
        _append(self._steps, (step.step_id, lane, *times, *tokens, *counts))

    def _has_space(self, items: Any, limit: int) -> bool:
        if len(items) < limit:
            return True
        self.is_complete = False
        return False

    def _time(self, time_ns: int) -> int:
        if self._begin_ns is None:
            self._begin_ns = time_ns
        return (time_ns - self._begin_ns) // _UNITS_NS

    def render(self, title: str, rows: Sequence[tuple[str, str]], notes: Sequence[str]) -> str:
        """Return the page. rows: names and values above the picture. notes: warnings."""
        data = {
            "steps": _lists(self._steps),
            "slices": _lists(self._slices),
            "kinds": KINDS,
            "requests": sorted(self._requests.values()),
        }
        script, style = _file("viewer.js"), _file("viewer.css")
        page = _file("viewer.html")
        parts = {
            "POLICY": _policy(script, style),
            "TITLE": escape(one_line(title, 200)),
            "ROWS": "".join(
                f"<div><dt>{escape(name)}</dt><dd>{escape(one_line(value, 300))}</dd></div>"
                for name, value in rows
            ),
            "NOTES": "".join(f'<p class="note">{escape(note)}</p>' for note in notes),
            "STYLE": style,
            "SCRIPT": script,
            "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        }
        head, *rest = page.split("@@")
        return head + "".join(
            parts[item] if index % 2 == 0 else item for index, item in enumerate(rest)
        )


_STEP_COLUMNS = (
    *("step_id", "lane", "begin", "duration", "prefill", "decode"),
    *("running", "waiting", "blocks"),
)
_SLICE_COLUMNS = ("request", "kind", "begin", "duration", "steps", "tokens")


def _append(columns: Mapping[str, array[int]], values: Sequence[int]) -> None:
    for column, value in zip(columns.values(), values, strict=True):
        column.append(value)


def _lists(columns: Mapping[str, array[int]]) -> dict[str, list[int]]:
    return {name: column.tolist() for name, column in columns.items()}


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _policy(script: str, style: str) -> str:
    return (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

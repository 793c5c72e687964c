"""The row that every reader of a trace returns, and the checks that all readers share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from dovetail.errors import UserError

MAX_TOKENS = 10_000_000
"""Rows with more prompt or output tokens are rejected."""
MAX_TIME_S = 10 * 366 * 86_400
"""Rows later than this many seconds after the first row are rejected."""
NS = 1_000_000_000
_MAX_TIME_NS = 10_000 * 366 * 86_400 * NS


class TraceError(UserError):
    """A trace cannot be read.

    path: the file. line: the line number, from 1; 0 for an error of the whole file.
    """

    def __init__(self, path: str, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}" if line else f"{path}: {message}")
        self.path = path
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace.

    line: its line in the file, counted from 1. arrival_ns: time since an origin that all rows of
    the file share. session, tenant: names, or "". turn: position in the session, from 0; a row with
    turn > 0 continues the previous row of its session. prefix_hashes: as in `WorkloadRequest`.
    max_tokens: the client's limit; 0 if the format has none.
    """

    line: int
    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    session: str = ""
    tenant: str = ""
    turn: int = 0
    priority: int = 0
    max_tokens: int = 0
    prefix_hashes: tuple[int, ...] = ()


class RowChecker:
    """Converts fields of one file to integers; raises `TraceError` for invalid values."""

    def __init__(self, path: str) -> None:
        self.path = path

    def fail(self, line: int, message: str) -> NoReturn:
        """Raise `TraceError` for a line."""
        raise TraceError(self.path, line, message)

    def count(self, line: int, name: str, value: object, *, least: int = 1) -> int:
        """Return a number of tokens. Accepts integers, integral floats, and both as strings."""
        number = self.number(line, name, value)
        if number != int(number):
            self.fail(line, f"{name}={value!r} is not an integer.")
        if not least <= number <= MAX_TOKENS:
            self.fail(line, f"{name}={value!r} is not between {least} and {MAX_TOKENS:,}.")
        return int(number)

    def number(self, line: int, name: str, value: object) -> float:
        """Return a finite number."""
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self.fail(line, f"{name}={_shortened(value)} is not a number.")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail(line, f"{name}={_shortened(value)} is not a number.")
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(line, f"{name}={value!r} is not finite.")
        if isinstance(value, int) and value.bit_length() > 64:
            self.fail(line, f"{name} is an integer of more than 64 bits.")
        return value

    def time_ns(self, line: int, name: str, value: object, *, unit_ns: int) -> int:
        """Return a time in nanoseconds from a number of units; it must not be negative."""
        number = self.number(line, name, value)
        if number < 0:
            self.fail(line, f"{name}={value!r} is negative.")
        if number * unit_ns > _MAX_TIME_NS:
            self.fail(line, f"{name}={value!r} is more than 10,000 years.")
        if isinstance(number, float):
            return round(number * unit_ns)
        return number * unit_ns

    def in_order(self, rows: Iterable[TraceRow]) -> Iterator[TraceRow]:
        """Yield the rows; raise `TraceError` if one is earlier than its predecessor or too late."""
        first = last = None
        for row in rows:
            if first is None or last is None:
                first = last = row.arrival_ns
            if row.arrival_ns < last:
                early_s = (last - row.arrival_ns) / NS
                self.fail(
                    row.line,
                    f"the row is {early_s:.6g} s earlier than the row before it. Sort the file.",
                )
            last = row.arrival_ns
            if last - first > MAX_TIME_S * NS:
                self.fail(row.line, "the row is more than ten years later than the first row.")
            yield row


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:39]}…"

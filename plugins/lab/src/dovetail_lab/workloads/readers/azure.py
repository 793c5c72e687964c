"""Reads the LLM inference traces of Azure, 2023 and 2024.

Format: CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens. TIMESTAMP is
"2023-11-16 18:17:03.9799600" (2023) or has an offset from UTC (2024). Source: the project
Azure/AzurePublicDataset.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dovetail_lab.workloads.readers.lines import read_table
from dovetail_lab.workloads.readers.trace_row import NS, RowChecker, TraceRow

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s*\Z")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_azure(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a trace; raise TraceError for an invalid or unsorted row."""
    checker = RowChecker(str(path))
    return checker.in_order(_rows(path, checker))


def _rows(path: Path, checker: RowChecker) -> Iterator[TraceRow]:
    for line, fields in read_table(path, COLUMNS):
        yield TraceRow(
            line=line,
            arrival_ns=_time_ns(checker, line, fields["TIMESTAMP"]),
            num_prompt_tokens=checker.count(line, "ContextTokens", fields["ContextTokens"]),
            num_output_tokens=checker.count(line, "GeneratedTokens", fields["GeneratedTokens"]),
        )


def _time_ns(checker: RowChecker, line: int, text: str) -> int:
    """Return the nanoseconds since 1970; `datetime` alone would drop digits after microseconds."""
    match = _TIME.match(text.strip())
    if match is None:
        checker.fail(line, f"TIMESTAMP={text[:40]!r} is not a date and time.")
    day, time, fraction, offset = match.groups()
    try:
        moment = datetime.fromisoformat(f"{day} {time}{(offset or 'Z')}")
    except ValueError:
        checker.fail(line, f"TIMESTAMP={text[:40]!r} is not a date and time.")
    seconds = (moment - _EPOCH) // timedelta(seconds=1)
    return seconds * NS + int((fraction or "0").ljust(9, "0"))

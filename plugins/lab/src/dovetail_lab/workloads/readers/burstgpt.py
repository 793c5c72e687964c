"""Reads the traces of BurstGPT.

Format: CSV with the columns Timestamp (seconds), Model, Request tokens, Response tokens, Total
tokens, Log Type; newer releases also have Session ID and Elapsed time. Fields are found by column
name, so both releases can be read. A row with 0 response tokens is a failed request and is skipped.
Source: Wang et al., "BurstGPT", arXiv:2401.17644.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dovetail_lab.workloads.readers.lines import read_table
from dovetail_lab.workloads.readers.trace_row import NS, RowChecker, TraceRow

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
_NO_SESSION = frozenset({"", "-1", "nan", "none", "null"})


def read_burstgpt(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a trace; the column Model becomes the tenant.

    Raises TraceError for an invalid or unsorted row.
    """
    checker = RowChecker(str(path))
    return checker.in_order(_rows(path, checker))


def _rows(path: Path, checker: RowChecker) -> Iterator[TraceRow]:
    turns: Counter[str] = Counter()
    for line, fields in read_table(path, COLUMNS):
        num_output = checker.count(line, "Response tokens", fields["Response tokens"], least=0)
        num_prompt = checker.count(line, "Request tokens", fields["Request tokens"], least=0)
        if not num_output or not num_prompt:
            continue
        session = fields.get("Session ID", "").strip()
        session = "" if session.lower() in _NO_SESSION else session
        yield TraceRow(
            line=line,
            arrival_ns=checker.time_ns(line, "Timestamp", fields["Timestamp"], unit_ns=NS),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            session=session,
            turn=turns[session] if session else 0,
            tenant=fields.get("Model", "").strip(),
        )
        if session:
            turns[session] += 1

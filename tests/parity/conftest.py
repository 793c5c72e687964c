"""Prints the counts of the parity tests at the end of the run, even if output is captured."""

from __future__ import annotations

import pytest

from parity.commit_seed import commit_seed

COLUMNS = "{:>6} {:>9} {:>5} {:>9} {:>14} {:>6} {:>7} {:>5}  {}"
HEADINGS = (
    "budget",
    "positions",
    "excl.",
    "max |Δ|",
    "qualify",
    "tokens",
    "qualify",
    "equal",
    "case",
)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for outcome in terminalreporter.stats.values() for r in outcome]
    rows = [
        value
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == "parity"
    ]
    if not rows:
        return
    seed, source = commit_seed()
    terminalreporter.section("parity with transformers, float32")
    terminalreporter.write_line(f"seed {seed} ({source})")
    terminalreporter.write_line(COLUMNS.format(*HEADINGS))
    for row in rows:
        terminalreporter.write_line(COLUMNS.format(*row))

"""`dovetail lab show`: print a summary or the steps of a decision log."""

from __future__ import annotations

import json
from array import array
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.decision_log import LoggedPlan, LogReader
from dovetail_lab.summary import LogObserver, summarize, summary_rows

_LOG_HELP = "The decision log: a file written with --decision-log."
_STEPS_HELP = "Show each step as one line of JSON instead of the summary."


def show(
    log: Annotated[Path, Parameter(help=_LOG_HELP)],
    /,
    *,
    steps: Annotated[bool, Parameter(negative="", help=_STEPS_HELP)] = False,
) -> int:
    """Show the content of a decision log. It contains no text and no tokens of a model."""
    reader = LogReader(log)
    summary = summarize(reader, _StepPrinter() if steps else LogObserver())
    if not steps:
        print_table(("", ""), summary_rows(summary))
    if reader.truncated:
        print_line("The log is truncated; its complete records were read.")
    return 0


class _StepPrinter(LogObserver):
    """Prints each plan as a line of JSON."""

    def add_plan(self, plan: LoggedPlan, now_ns: int) -> None:
        """Print a plan."""
        joins = [[join.request_id, join.row] for join in plan.joins]
        shown = {name: value for name, value in {**asdict(plan), "joins": joins}.items() if value}
        print(json.dumps({"step_id": plan.step_id, "now_ns": now_ns, **shown}, default=_listed))


def _listed(value: object) -> list[int]:
    return list(value) if isinstance(value, array) else []

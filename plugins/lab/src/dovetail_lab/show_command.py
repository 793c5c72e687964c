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
from dovetail_lab.summary import LogObserver, Summary, summarize

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
        print_table(("", ""), _rows(summary))
    if reader.truncated:
        print_line("The log is cut off; its complete records were read.")
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


def _rows(summary: Summary) -> list[tuple[str, str]]:
    header, covered_s = summary.header, (summary.last_ns - summary.first_ns) / 1e9
    num_steps = max(1, summary.num_steps)
    limits = ", ".join(f"{name} {value}" for name, value in asdict(header.limits).items() if value)
    shares = summary.num_cached_tokens, summary.num_prompt_tokens
    return [
        ("scheduler", header.scheduler),
        ("policy", header.policy or "built into the scheduler"),
        ("limits", limits),
        ("KV blocks", f"{header.kv_cache.num_blocks - 1} of {header.kv_cache.block_size} tokens"),
        ("steps", f"{summary.num_steps:,}, {summary.num_empty_steps:,} without tokens"),
        ("time", f"{covered_s:.3f} s"),
        ("requests", f"{summary.num_requests:,}, {summary.num_aborted:,} aborted"),
        ("grants", f"{summary.num_grants:,}, {summary.num_grants / num_steps:.1f} per step"),
        ("tokens", f"{summary.num_tokens:,} computed, {summary.num_sampled:,} sampled"),
        ("preemptions", f"{summary.num_preemptions:,} requests readmitted"),
        ("prefix hits", f"{summary.hit_rate:.1%} ({shares[0]:,} of {shares[1]:,} prompt tokens)"),
        ("size", f"{summary.num_bytes:,} bytes, {summary.num_bytes / num_steps:.0f} per step"),
    ]

"""Tables of a report, as rows of strings, which are printed or written as HTML."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dovetail_lab.experiments.comparison import EQUAL, compare_all, rank_policies
from dovetail_lab.experiments.metric_table import MAIN_METRICS, METRICS
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.experiments.statistics import mean_interval

PREFERRED_LOAD = 0.9


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table. headings, rows: all of the same width."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def oriented(self) -> TextTable:
        """Return the table, transposed if columns outnumber rows by more than two."""
        if len(self.headings) <= len(self.rows) + 2:
            return self
        (_, *names), *rows = zip(self.headings, *self.rows, strict=True)
        return TextTable(title=self.title, headings=["metric", *names], rows=rows)


def policy_table(results: Results, engine: str, load: float) -> TextTable:
    """Return a table of means ± half the width of the interval, one row per policy."""
    metrics = shown_metrics(results, engine, load)
    rows = []
    for policy in results.policies:
        cell = Cell(engine=engine, policy=policy, load=load)
        row = [policy]
        for name in metrics:
            values = list(results.values(cell, name).values())
            row.append(_mean_text(values, results.spec.confidence) if values else "–")
        rows.append(row)
    headings = ["policy", *(_heading(name) for name in metrics)]
    return TextTable(title=f"Load {load:g}: mean ± half-width", headings=headings, rows=rows)


def difference_table(results: Results, engine: str, load: float) -> TextTable:
    """Return a table of each policy's difference from the baseline, in percent and in words."""
    metrics = shown_metrics(results, engine, load)
    cells: dict[str, dict[str, str]] = {}
    for name in metrics:
        for item in compare_all(results, name, engine):
            if item.load == load:
                shown = f"{percent_text(item.difference.relative)} {item.verdict}"
                cells.setdefault(item.policy, {})[name] = shown.strip()
    rows = [
        [policy, *(result.get(name, "–") for name in metrics)] for policy, result in cells.items()
    ]
    headings = ["policy", *(METRICS[name].label for name in metrics)]
    title = f"Load {load:g}: paired differences to {results.baseline}"
    return TextTable(title=title, headings=headings, rows=rows)


def winner_table(results: Results, engine: str) -> TextTable:
    """Return the best policy of each metric at each load, or those that cannot be distinguished."""
    loads = sorted(results.spec.loads)
    rows = []
    for name in MAIN_METRICS:
        texts = [
            rank_policies(results, engine, load, name).describe(len(results.policies))
            for load in loads
        ]
        if any(text not in ("–", EQUAL) for text in texts):
            rows.append([METRICS[name].label, *texts])
    if not rows:
        rows.append(["all metrics", *[EQUAL] * len(loads)])
    headings = ["metric", *(f"load {load:g}" for load in loads)]
    return TextTable(title="Best policy", headings=headings, rows=rows)


def class_table(results: Results, engine: str, load: float) -> TextTable | None:
    """Return SLO attainment by class; None without classes."""
    names: list[str] = []
    entries: dict[str, dict[str, list[float]]] = {}
    for policy in results.policies:
        cell = Cell(engine=engine, policy=policy, load=load)
        for record in results.by_cell.get(cell, {}).values():
            for name, values in record.classes.items():
                names += [name] if name not in names else []
                by_class = entries.setdefault(policy, {})
                by_class.setdefault(name, []).append(values["slo_attainment"])
    if not names:
        return None
    rows = [
        [
            policy,
            *(_mean_text(values.get(name, []), results.spec.confidence, "%") for name in names),
        ]
        for policy, values in entries.items()
    ]
    return TextTable(
        title=f"Load {load:g}: SLO attainment by class", headings=["policy", *names], rows=rows
    )


def count_table(results: Results, engine: str) -> TextTable:
    """Return a table of the complete, failed and unfinished runs and requests of each cell."""
    rows = []
    for load in sorted(results.spec.loads):
        for policy in results.policies:
            cell = Cell(engine=engine, policy=policy, load=load)
            measured, censored, failed = results.censored(cell)
            num_ok = len(results.by_cell.get(cell, {}))
            num_runs = results.spec.seeds
            rows.append(
                [
                    f"{load:g}",
                    policy,
                    f"{num_ok} of {num_runs}",
                    f"{measured:,}",
                    f"{censored:,}",
                    f"{failed:,}",
                ]
            )
    headings = ["load", "policy", "complete runs", "measured requests", "unfinished", "failed"]
    return TextTable(title="Runs and requests", headings=headings, rows=rows)


def shown_metrics(results: Results, engine: str, load: float) -> list[str]:
    """Return the main metrics that are not zero for every policy at a load."""
    return [
        name
        for name in MAIN_METRICS
        if any(
            any(results.values(Cell(engine=engine, policy=policy, load=load), name).values())
            for policy in results.policies
        )
    ]


def report_load(loads: Sequence[float]) -> float:
    """Return the load for charts of single runs: the highest load up to 0.9, or the lowest load."""
    below = [load for load in loads if load <= PREFERRED_LOAD]
    return max(below) if below else min(loads)


def number_text(value: float) -> str:
    """Return a number with three significant digits."""
    if not value or not math.isfinite(value):
        return "0" if not value else str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(digits, 6)}f}"


def percent_text(value: float) -> str:
    """Return a signed percentage with at least two significant digits; "" if it is not finite."""
    if not math.isfinite(value) or not value:
        return ""
    digits = max(0, 1 - math.floor(math.log10(abs(value) * 100)))
    return f"{value:+.{min(digits, 3)}%}"


def _heading(name: str) -> str:
    metric = METRICS[name]
    return f"{metric.label} ({metric.unit})" if metric.unit else metric.label


def _mean_text(values: Sequence[float], confidence: float, unit: str = "") -> str:
    if not values:
        return "–"
    interval = mean_interval(values, confidence)
    half = interval.high - interval.mean
    if unit == "%":
        shown = f"{interval.mean:.1%}"
        return shown if math.isnan(half) else f"{shown} ± {half:.1%}"
    shown = number_text(interval.mean)
    return shown if math.isnan(half) else f"{shown} ± {number_text(half)}"

"""The results of a load test as tables and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dovetail.cli.plugins_table import print_line, print_table
from dovetail.cli.terminal import printable
from dovetail.errors import ConfigError
from dovetail_client_tools.load.load_request import NS
from dovetail_client_tools.load.point import LATENCIES, PERCENTILES, SLO_NAMES, Point
from dovetail_lab.reports.tables import TextTable

MAX_SEND_DELAY_MS = 20.0


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """A load test. case: its options, by name. objectives: in milliseconds."""

    url: str
    model: str
    case: Mapping[str, Any]
    objectives: Mapping[str, float]
    points: Sequence[Point]


def print_report(report: LoadReport) -> None:
    """Print the tables and warnings."""
    print_line(printable(f"{report.model} at {report.url}"), style="bold")
    for table in (rate_table(report), *latency_tables(report)):
        print_line("")
        print_table(table.headings, table.rows, title=table.title)
    for text in warnings(report):
        print_line(printable(text), style="yellow")


def rate_table(report: LoadReport) -> TextTable:
    """Return counts and rates, one row for each point."""
    headings = ["load", "ok", "failed", "seconds", "requests/s", "output tokens/s"]
    headings += ["prompt tokens/s", "peak in flight"]
    rows = []
    for point in report.points:
        row = [point.label, f"{point.num_ok:,}", f"{point.num_failed:,}"]
        row += [f"{point.duration_s:.2f}", f"{point.request_rate:.2f}"]
        row += [f"{point.output_rate:,.1f}", f"{point.prompt_rate:,.1f}", f"{point.record.peak:,}"]
        if point.goodput is not None and point.goodput_share is not None:
            row.append(f"{point.goodput:.2f} ({point.goodput_share:.1%})")
        rows.append(row)
    if report.objectives:
        headings.append("goodput/s")
    return TextTable(title="Rates", headings=headings, rows=rows)


def latency_tables(report: LoadReport) -> list[TextTable]:
    """Return a table of latencies for each point."""
    tables = []
    for point in report.points:
        rows = []
        for name, text in LATENCIES.items():
            if name in point.latencies:
                item = point.latencies[name]
                row = [f"{name.upper()} ({text})", f"{item.mean:.2f}"]
                row += [f"{item.percentiles[percent]:.2f}" for percent in PERCENTILES]
                rows.append([*row, f"{item.max:.2f}", _limit(report, name)])
        if rows:
            headings = ["ms", "mean", *(f"p{percent}" for percent in PERCENTILES), "max", "SLO"]
            title = f"Latencies at {point.label}"
            tables.append(TextTable(title=title, headings=headings, rows=rows))
    return tables


def _limit(report: LoadReport, name: str) -> str:
    limit = report.objectives.get(name) if name in SLO_NAMES else None
    return "–" if limit is None else f"≤ {limit:g}"


def warnings(report: LoadReport) -> list[str]:
    """Return warnings about errors and about inexact results."""
    texts = []
    for point in report.points:
        for kind, count in point.record.errors.most_common(4):
            texts.append(f"{point.label}: {count:,} × {kind}: {point.record.messages[kind]}")
        if point.send_delay_p99_ms > MAX_SEND_DELAY_MS and point.rate and not point.concurrency:
            texts.append(
                f"{point.label}: 1 % of the requests were sent at least "
                f"{point.send_delay_p99_ms:.0f} ms late, because this client was too slow."
            )
        if point.num_ok and not point.record.has_usage:
            texts.append(
                f"{point.label}: the server reports no usage, so each event counts as one token."
            )
        intended = sum(item.num_intended_tokens for item in point.record.requests if not item.error)
        actual = sum(item.num_output_tokens for item in point.record.requests if not item.error)
        if actual < 0.95 * intended:
            texts.append(
                f"{point.label}: the outputs have {actual / intended:.0%} of the intended tokens; "
                "they ended early."
            )
    return texts


def write_json(path: Path, report: LoadReport) -> None:
    """Write all results. Raise ConfigError if the file cannot be written."""
    value = {
        "command": "dovetail bench serve",
        "version": version("dovetail-client-tools"),
        "url": report.url,
        "model": report.model,
        "case": report.case,
        "slo_ms": report.objectives,
        "points": [_point(point) for point in report.points],
    }
    write_text("--json", path, json.dumps(value, indent=1) + "\n")


def write_text(option: str, path: Path, text: str) -> None:
    """Write a file. Raise ConfigError with the option if that fails."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path} cannot be written: {error.strerror}.") from None


def _point(point: Point) -> dict[str, Any]:
    latencies = {
        name: {
            **{key: value for key, value in vars(item).items() if key != "percentiles"},
            **{f"p{percent}": value for percent, value in item.percentiles.items()},
        }
        for name, item in point.latencies.items()
    }
    record = point.record
    return {
        "rate": None if math.isinf(point.rate) or not point.rate else point.rate,
        "is_burst": math.isinf(point.rate),
        "concurrency": point.concurrency or None,
        "duration_s": point.duration_s,
        "num_ok": point.num_ok,
        "num_failed": point.num_failed,
        "requests_per_s": point.request_rate,
        "output_tokens_per_s": point.output_rate,
        "prompt_tokens_per_s": point.prompt_rate,
        "goodput_per_s": point.goodput,
        "goodput_share": point.goodput_share,
        "peak_in_flight": record.peak,
        "send_delay_p99_ms": point.send_delay_p99_ms,
        "latencies_ms": latencies,
        "errors": [
            {"kind": kind, "count": count, "first_message": record.messages[kind]}
            for kind, count in record.errors.most_common()
        ],
        "requests": {
            "number": [item.number for item in record.requests],
            "sent_s": [item.sent_ns / NS for item in record.requests],
            "first_token_s": [_seconds(item.first_ns) for item in record.requests],
            "end_s": [_seconds(item.end_ns) for item in record.requests],
            "num_prompt_tokens": [item.num_prompt_tokens for item in record.requests],
            "num_output_tokens": [item.num_output_tokens for item in record.requests],
            "error": [item.error for item in record.requests],
        },
    }


def _seconds(time_ns: int) -> float | None:
    return None if time_ns < 0 else time_ns / NS

"""The results of a load test as one HTML file with charts, without external requests."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from dovetail_client_tools.load.load_request import NS
from dovetail_client_tools.load.point import LATENCIES, Point, latency_values
from dovetail_client_tools.load.report import LoadReport, latency_tables, rate_table, warnings
from dovetail_lab.reports.figures import chart_style, color_of, inline_svg, marker_of, new_figure
from dovetail_lab.reports.html_page import Section, render_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_DOTS = 2000
_MAX_STEPS = 500
_PERCENTS = (50, 90, 99)


def page(report: LoadReport) -> str:
    """Return the page. Raise UserError if matplotlib is not installed."""
    summary = Section(
        title="Summary",
        paragraphs=[f"Model {report.model}, server {report.url}."],
        warnings=warnings(report),
        tables=[rate_table(report), *latency_tables(report)],
    )
    sections = [summary]
    with chart_style("load"):
        if len(report.points) > 1:
            caption = "Each dot is one run. Lines connect runs in the order of their load."
            sections.append(_chart_section("Load sweep", [(_draw_sweep(report), caption)]))
        sections.append(
            _chart_section("Latencies", [(_draw_distributions(report), _DISTRIBUTIONS)])
        )
        sections.append(
            _chart_section("Over time", [(_draw_time(item), item.label) for item in report.points])
        )
    details = json.dumps({**report.case, "slo_ms": report.objectives}, indent=1)
    sections.append(Section(title="Method", paragraphs=_METHOD, details=[("The options", details)]))
    return render_page("Load test", f"dovetail bench serve, {report.model}", sections)


_DISTRIBUTIONS = (
    "Share of the values that are at most x milliseconds. A dashed line is an objective."
)
_METHOD = [
    "Times are measured in the client, from the moment at which a request is written to its "
    "connection. TTFT ends with the first text. ITL is the time between two events with text. "
    "TPOT is the time from the first to the last text, divided by the number of output tokens "
    "minus one. End to end is the time to the end of the response.",
    "In an open loop, requests are sent at their times, whether or not earlier ones have ended. "
    "In a closed loop, a request is sent when another one has ended. Goodput counts requests that "
    "met every objective.",
]


def _chart_section(title: str, figures: list[tuple[Figure, str]]) -> Section:
    charts = [(inline_svg(figure, "load"), caption) for figure, caption in figures]
    return Section(title=title, charts=charts)


def _draw_sweep(report: LoadReport) -> Figure:
    figure, axes = new_figure(2, 3, size=(10.2, 5.6))
    points = report.points
    is_open = all(point.rate for point in points)
    loads = [_load(point, is_open) for point in points]
    for axis, (name, text) in zip(axes, LATENCIES.items(), strict=False):
        for index, percent in enumerate(_PERCENTS):
            shown = [
                (load, point.latencies[name].percentiles[percent])
                for load, point in zip(loads, points, strict=True)
                if name in point.latencies
            ]
            _line(axis, shown, index, f"p{percent}")
        axis.set_title(text)
        axis.set_ylabel("ms")
        _draw_limit(axis, report, name, is_vertical=False)
    axes[0].legend()
    axes[4].set_title("output")
    axes[4].set_ylabel("tokens/s")
    _line(axes[4], list(zip(loads, [item.output_rate for item in points], strict=True)), 0, "")
    axes[5].set_title("requests")
    axes[5].set_ylabel("requests/s")
    rates = [item.request_rate for item in points]
    _line(axes[5], list(zip(loads, rates, strict=True)), 0, "completed")
    if report.objectives:
        valid = [item.goodput or 0.0 for item in points]
        _line(axes[5], list(zip(loads, valid, strict=True)), 1, "goodput")
    axes[5].legend()
    for axis in axes:
        axis.set_xlabel("planned requests/s" if is_open else "requests in flight")
        axis.set_ylim(bottom=0)
    return figure


def _load(point: Point, is_open: bool) -> float:
    if not is_open:
        return float(point.concurrency)
    return point.request_rate if math.isinf(point.rate) else point.rate


def _line(axis: Axes, shown: list[tuple[float, float]], index: int, label: str) -> None:
    axis.plot(
        [load for load, _ in shown],
        [value for _, value in shown],
        color=color_of(index),
        marker=marker_of(index),
        ms=4,
        label=label or None,
    )


def _draw_distributions(report: LoadReport) -> Figure:
    figure, axes = new_figure(2, 2, size=(9.4, 5.6))
    for axis, (name, text) in zip(axes, LATENCIES.items(), strict=True):
        for index, point in enumerate(report.points):
            values = sorted(latency_values(point.record, name))
            if values:
                step = max(1, len(values) // _MAX_STEPS)
                kept = [*range(0, len(values), step), len(values) - 1]
                axis.step(
                    [values[i] for i in kept],
                    [(i + 1) / len(values) for i in kept],
                    where="post",
                    color=color_of(index),
                    label=point.label,
                )
        axis.set_title(text)
        axis.set_xlabel("ms")
        axis.set_ylim(0, 1.02)
        axis.set_xlim(left=0)
        _draw_limit(axis, report, name, is_vertical=True)
    axes[0].legend()
    return figure


def _draw_limit(axis: Any, report: LoadReport, name: str, *, is_vertical: bool) -> None:
    limit = report.objectives.get(name)
    if limit is not None:
        draw = axis.axvline if is_vertical else axis.axhline
        draw(limit, color="#444444", lw=1, ls="--")


def _draw_time(point: Point) -> Figure:
    figure, (latencies, flight) = new_figure(1, 2, size=(9.4, 2.7))
    ok = [item for item in point.record.requests if not item.error and item.has_text]
    ok = ok[:: max(1, len(ok) // _MAX_DOTS)]
    sent = [item.sent_ns / NS for item in ok]
    latencies.plot(
        sent,
        [item.ttft_ms for item in ok],
        ".",
        ms=3,
        color=color_of(0),
        label="time to first token",
    )
    latencies.plot(
        sent, [item.e2e_ms for item in ok], ".", ms=3, color=color_of(1), label="end to end"
    )
    latencies.set_title("latency by send time")
    latencies.set_ylabel("ms")
    latencies.set_ylim(bottom=0)
    latencies.legend()
    times, counts = _in_flight(point)
    flight.step(times, counts, where="post", color=color_of(2))
    flight.set_title("requests in flight")
    flight.set_ylim(bottom=0)
    for axis in (latencies, flight):
        axis.set_xlabel("seconds")
    return figure


def _in_flight(point: Point) -> tuple[list[float], list[int]]:
    changes = [(item.sent_ns, 1) for item in point.record.requests]
    changes += [(item.end_ns, -1) for item in point.record.requests]
    times, counts, count = [0.0], [0], 0
    for time_ns, change in sorted(changes):
        count += change
        times.append(time_ns / NS)
        counts.append(count)
    step = max(1, len(times) // _MAX_STEPS)
    return times[::step], counts[::step]

"""Builds the report of an experiment: one HTML file, and every chart as PNG and SVG."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import UserError
from dovetail_lab.experiments.job import built_workload
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.reports.figures import chart_style, save_figure
from dovetail_lab.reports.html_page import Section, render_page
from dovetail_lab.reports.load_charts import draw_curves, draw_differences
from dovetail_lab.reports.perfetto import write_trace
from dovetail_lab.reports.run_charts import (
    draw_cache,
    draw_distributions,
    draw_gantt,
    draw_tenants,
    records_of,
)
from dovetail_lab.reports.tables import (
    class_table,
    count_table,
    difference_table,
    policy_table,
    report_load,
    winner_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_GANTT_POLICIES = 3
MIN_SPAN = 10
"""Minimum ratio of the time during which requests arrive to the mean latency. If the ratio is
lower, the report warns that queues cannot build up."""


@dataclass(kw_only=True)
class ReportFiles:
    """The files of a report."""

    page: Path
    charts: list[Path] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)


def write_report(results: Results, out: Path) -> ReportFiles:
    """Write report.html, figures/*.png, figures/*.svg and traces/*.json; return their paths.

    Raises UserError if matplotlib is not installed or no run is complete.
    """
    if not results.by_cell:
        raise UserError(
            "no run is complete, so there is nothing to report: "
            f"{results.failures[0].error if results.failures else 'no runs'}"
        )
    files = ReportFiles(page=out / "report.html")
    for folder in ("figures", "traces"):
        (out / folder).mkdir(exist_ok=True)
    sections = [_summary(results)]
    for engine in results.spec.engines:
        sections += _engine_sections(results, engine, out, files)
    sections.append(_method(results))
    subtitle = (
        f"{results.spec.workload.trace or results.spec.workload.synthetic or 'own workload'}, "
        f"{results.spec.seeds} seeds of {results.spec.workload.num_requests:,} requests, "
        f"capacity {results.capacity:.3g} requests/s"
    )
    title = f"Scheduler comparison: {results.spec.name}"
    files.page.write_text(render_page(title, subtitle, sections), "utf-8")
    return files


def _engine_sections(results: Results, engine: str, out: Path, files: ReportFiles) -> list[Section]:
    """Return the sections of one engine, without those that have no content."""
    load = report_load(results.spec.loads)
    files.traces += _traces(results, engine, load, out)
    sections = [_policy_section(results, engine, load)]
    for title, name, draw, caption in _charts(results, engine, load):
        full = f"{name}_{engine}"
        with chart_style(full):
            figure = draw()
        if figure is not None:
            paths, element = save_figure(figure, out / "figures", full)
            files.charts += paths
            sections.append(Section(title=title, charts=[(element, caption)]))
    sections.append(Section(title="Runs", tables=[count_table(results, engine)]))
    if len(results.spec.engines) > 1:
        sections = [replace(item, title=f"{item.title} ({engine})") for item in sections]
    return sections


def _policy_section(results: Results, engine: str, load: float) -> Section:
    classes = class_table(results, engine, load)
    return Section(
        title="Policies",
        paragraphs=[
            f"At load {load:g}. The baseline of the differences is {results.baseline}. A "
            "difference counts only if its interval excludes zero after Holm's correction."
        ],
        tables=[
            winner_table(results, engine),
            policy_table(results, engine, load),
            difference_table(results, engine, load),
            *([classes] if classes else []),
        ],
    )


def _charts(
    results: Results, engine: str, load: float
) -> list[tuple[str, str, Callable[[], Figure | None], str]]:
    """Return (section title, file name, drawing function, caption) of each chart."""
    gantt = results.policies[:MAX_GANTT_POLICIES]
    return [
        (
            "Load",
            "load",
            lambda: draw_curves(results, engine),
            "Lines: mean over seeds. Bands: confidence interval of the mean, by Student's t.",
        ),
        (
            "Differences",
            "differences",
            lambda: draw_differences(results, engine, load),
            f"Load {load:g}. Bars: mean paired difference to {results.baseline}, with its "
            "confidence interval. Hollow bars are not distinguishable from zero.",
        ),
        (
            "Distributions",
            "distributions",
            lambda: draw_distributions(results, engine, load),
            f"Load {load:g}, measured requests of all seeds. A curve that ends below 1 has "
            "unfinished requests.",
        ),
        (
            "Requests over time",
            "requests",
            lambda: draw_gantt(results, engine, load, gantt),
            f"Load {load:g}, first seed, the same requests from the middle of the run.",
        ),
        (
            "Tenants",
            "tenants",
            lambda: draw_tenants(results, engine, load),
            "Service: prompt tokens + 2 × output tokens, cumulative.",
        ),
        (
            "Cache and queues",
            "cache",
            lambda: draw_cache(results, engine, load),
            f"Load {load:g}, first seed.",
        ),
    ]


def _traces(results: Results, engine: str, load: float, out: Path) -> list[Path]:
    """Write the first seed's run of each policy as a Chrome trace."""
    paths = []
    for policy, record in records_of(results, engine, load).items():
        name = "".join(item if item.isalnum() else "_" for item in policy)
        path = out / "traces" / f"{name}_{engine}_{load:g}.json"
        requests, steps = results.folder.read_columns(record.run_id)
        names = [
            item.request_id for item in built_workload(results.spec, record.key).workload.requests
        ]
        write_trace(path, requests, steps, names)
        paths.append(path)
    return paths


def _summary(results: Results) -> Section:
    warnings = []
    if results.failures:
        failed = sorted({item.key.policy for item in results.failures})
        warnings.append(
            f"{len(results.failures)} of {len(results.records)} runs failed, all of "
            f"{', '.join(failed)}. First error: {results.failures[0].error}"
        )
    complete = [item for item in results.records if item.ok]
    num_censored = sum(item.num_censored for item in complete)
    if num_censored:
        warnings.append(
            f"{num_censored:,} measured requests did not end. Means and quantiles that depend on "
            "them are not reported."
        )
    if any(item.workload.get("overlap") for item in complete):
        warnings.append(
            "The trace is too short for separate rows per seed, so the seeds share rows and the "
            "intervals are too narrow. Use fewer requests or seeds."
        )
    num_clipped = sum(item.workload.get("num_clipped", 0) for item in complete)
    if num_clipped:
        warnings.append(f"{num_clipped:,} requests were clipped to the engine's maximum length.")
    warnings += _short_runs(results)
    if results.spec.seeds < 5:
        warnings.append(
            f"The experiment has {results.spec.seeds} seeds. Use at least 10 to find small "
            "differences."
        )
    paragraphs = [
        f"{len(results.records):,} runs of {len(results.policies)} policies: "
        f"{', '.join(results.policies)}. Load 1 is {results.capacity:.4g} requests/s, measured by "
        f"a burst with {results.baseline}.",
    ]
    return Section(title="Summary", paragraphs=paragraphs, warnings=warnings)


def _short_runs(results: Results) -> list[str]:
    """Warn if arrivals end before the engine can reach a steady state."""
    short = []
    for load in sorted(results.spec.loads):
        cell = Cell(engine=results.spec.engines[0], policy=results.baseline, load=load)
        runs = list(results.by_cell.get(cell, {}).values())
        latencies = [run.values.get("e2e_mean") or 0.0 for run in runs]
        spans = [run.facts.get("span_s", 0.0) for run in runs]
        if runs and sum(spans) < MIN_SPAN * sum(latencies):
            short.append(f"{load:g}")
    if not short:
        return []
    return [
        f"At load {', '.join(short)} the arrivals last less than {MIN_SPAN} times the mean latency "
        "of the baseline, so queues cannot build up. Use more requests."
    ]


def _method(results: Results) -> Section:
    spec = results.spec
    definitions = "\n".join(
        f"{item.name:<16} {item.definition}" + (f" [{item.unit}]" if item.unit else "")
        for item in METRICS.values()
    )
    paragraphs = [
        "Every policy ran the same workloads (common random numbers), so differences are paired "
        f"by seed. Intervals have a confidence of {spec.confidence:.0%}. A verdict needs three "
        "things: the t interval and the bootstrap interval of the paired difference exclude zero, "
        "and the p value passes Holm's correction for all comparisons of the metric.",
        f"The first {spec.warmup:.0%} and the last {spec.drain:.0%} of the requests are not "
        "measured. A 99th percentile is reported only for runs with at least "
        f"{spec.min_p99:,} measured requests.",
    ]
    described = json.dumps(spec.model_dump(mode="json"), indent=1)
    details = [("Definitions of the metrics", definitions), ("The experiment", described)]
    return Section(title="Method", paragraphs=paragraphs, details=details)

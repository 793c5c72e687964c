"""Charts of single runs: distributions, requests over time, tenants' service, cache use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail_lab.experiments.fairness import ServiceCurves, service_curves
from dovetail_lab.experiments.job import built_workload
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.experiments.run_files import RunRecord
from dovetail_lab.experiments.run_metrics import NS, latency_series
from dovetail_lab.reports.figures import color_of, new_figure
from dovetail_lab.simulation.results import NEVER, RequestColumns
from dovetail_lab.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_POINTS = 400
MAX_GANTT = 60
MAX_TENANTS = 8
_PHASES = (("waiting", "#c9c9c9"), ("prefill", "#e69f00"), ("decode", "#0072b2"))
_DISTRIBUTIONS = {
    "ttft": "Time to first token (s)",
    "tpot": "Time per output token (s)",
    "e2e": "End-to-end latency (s)",
    "gap": "Largest gap (s)",
}


def records_of(results: Results, engine: str, load: float) -> dict[str, RunRecord]:
    """Return the complete run of the first seed of each policy at a load."""
    entries = {}
    for policy in results.policies:
        runs = results.by_cell.get(Cell(engine=engine, policy=policy, load=load), {})
        if results.spec.first_seed in runs:
            entries[policy] = runs[results.spec.first_seed]
    return entries


def draw_distributions(results: Results, engine: str, load: float) -> Figure | None:
    """Draw cumulative distributions of the latencies of all seeds at one load."""
    pooled = {policy: _pooled(results, engine, policy, load) for policy in results.policies}
    pooled = {policy: series for policy, series in pooled.items() if series["e2e"]}
    if not pooled:
        return None
    figure, axes = new_figure(1, 4, size=(10.2, 2.9), sharey=True)
    for axis, (name, label) in zip(axes, _DISTRIBUTIONS.items(), strict=True):
        for policy, series in pooled.items():
            values = series[name]
            xs, ys = _distribution_points(values)
            axis.step(
                xs,
                ys,
                where="post",
                color=color_of(results.policies.index(policy)),
                label=policy,
                lw=1.4,
            )
        axis.set_xlabel(label)
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter("")
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("share of requests")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure


def draw_gantt(
    results: Results, engine: str, load: float, policies: Sequence[str]
) -> Figure | None:
    """Draw requests over time for some policies: waiting, prefill and decode of each request."""
    records = {
        policy: record
        for policy, record in records_of(results, engine, load).items()
        if policy in policies
    }
    if not records:
        return None
    figure, axes = new_figure(
        1, len(records), size=(4.6 * len(records), 4.4), sharex=True, sharey=True
    )
    first, last = None, None
    for axis, (policy, record) in zip(axes, records.items(), strict=True):
        columns, _ = results.folder.read_columns(record.run_id)
        if first is None or last is None:
            first, last = _busy_range(columns)
        _draw_requests(axis, columns, range(first, last))
        axis.set_title(policy)
        axis.set_xlabel("time (s)")
    axes[0].set_ylabel("request, in the order of arrival")
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def draw_tenants(results: Results, engine: str, load: float) -> Figure | None:
    """Draw the service of each tenant over time, one panel per policy; None for one tenant."""
    records = records_of(results, engine, load)
    if not records:
        return None
    workload = _workload(results, next(iter(records.values())))
    tenants = sorted({request.tenant for request in workload.requests})
    if not 2 <= len(tenants) <= MAX_TENANTS:
        return None
    width = min(4, len(records))
    num_rows = -(-len(records) // width)
    figure, axes = new_figure(
        num_rows, width, size=(2.9 * width, 2.6 * num_rows + 0.4), sharey=True
    )
    for axis, (policy, record) in zip(axes, records.items(), strict=False):
        curves = _curves(results, record, workload)
        for index, tenant in enumerate(tenants):
            times = [time / NS for time in curves.times_ns]
            values = [value / 1e3 for value in curves.service[tenant]]
            axis.plot(times, values, color=color_of(index), label=tenant or "(none)")
        axis.set_title(policy)
        axis.set_xlabel("time (s)")
    for axis in axes[len(records) :]:
        axis.set_visible(False)
    axes[0].set_ylabel("service (1,000 weighted tokens)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure


def draw_cache(results: Results, engine: str, load: float) -> Figure | None:
    """Draw KV blocks in use, running and waiting requests over time."""
    records = records_of(results, engine, load)
    panels = (
        ("num_used_blocks", "KV blocks in use"),
        ("num_running", "running requests"),
        ("num_waiting", "waiting requests"),
    )
    figure, axes = new_figure(1, 3, size=(10.2, 2.8))
    drawn = False
    for policy, record in records.items():
        steps = results.folder.read_columns(record.run_id)[1]
        if steps is None or not len(steps.start_ns):
            continue
        drawn, stride = True, max(1, len(steps.start_ns) // MAX_POINTS)
        times = [time / NS for time in steps.start_ns[::stride]]
        for axis, (name, _) in zip(axes, panels, strict=True):
            color = color_of(results.policies.index(policy))
            axis.step(
                times,
                getattr(steps, name)[::stride],
                where="post",
                color=color,
                lw=1.1,
                label=policy,
            )
    for axis, (_, label) in zip(axes, panels, strict=True):
        axis.set_title(label)
        axis.set_xlabel("time (s)")
        axis.set_ylim(bottom=0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure if drawn else None


def _pooled(results: Results, engine: str, policy: str, load: float) -> dict[str, list[float]]:
    """Return the sorted latencies of all seeds of a cell, as in `latency_series`."""
    pooled: dict[str, list[float]] = {name: [] for name in _DISTRIBUTIONS}
    cell = Cell(engine=engine, policy=policy, load=load)
    for record in results.by_cell.get(cell, {}).values():
        columns, _ = results.folder.read_columns(record.run_id)
        measured = range(*results.spec.cut.bounds(len(columns.arrival_ns)))
        for name, values in latency_series(columns, measured).items():
            pooled[name] += values
    return {name: sorted(values) for name, values in pooled.items()}


def _distribution_points(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most `MAX_POINTS` points of a cumulative distribution; omit censored values."""
    count = len(values)
    stride = max(1, count // MAX_POINTS)
    places = [*range(0, count, stride)]
    if count and places[-1] != count - 1:
        places.append(count - 1)
    finite = [place for place in places if values[place] != float("inf")]
    return [max(values[place], 1e-6) for place in finite], [(place + 1) / count for place in finite]


def _busy_range(columns: RequestColumns) -> tuple[int, int]:
    """Return a range of requests in the middle of the run."""
    count = len(columns.arrival_ns)
    first = max(0, count // 2 - MAX_GANTT // 2)
    return first, min(count, first + MAX_GANTT)


def _draw_requests(axis: Axes, columns: RequestColumns, shown: range) -> None:
    bars: dict[str, list[tuple[int, float, float]]] = {name: [] for name, _ in _PHASES}
    for index in shown:
        arrival, end = columns.arrival_ns[index], columns.finished_ns[index]
        times = (
            arrival,
            columns.admitted_ns[index],
            columns.first_token_ns[index],
            end if end != NEVER else columns.last_token_ns[index],
        )
        for (name, _), begin, stop in zip(_PHASES, times, times[1:], strict=False):
            if begin != NEVER and stop != NEVER and stop > begin:
                bars[name].append((index, begin / NS, (stop - begin) / NS))
    for name, color in _PHASES:
        rows = bars[name]
        axis.barh(
            [row[0] for row in rows],
            [row[2] for row in rows],
            left=[row[1] for row in rows],
            height=0.8,
            color=color,
            label=name,
        )
    axis.grid(axis="y", visible=False)


def _workload(results: Results, record: RunRecord) -> Workload:
    return built_workload(results.spec, record.key).workload


def _curves(results: Results, record: RunRecord, workload: Workload) -> ServiceCurves:
    columns, _ = results.folder.read_columns(record.run_id)
    ends = [time for time in columns.arrival_ns if time != NEVER]
    return service_curves(
        columns,
        [request.tenant for request in workload.requests],
        [request.num_prompt_tokens for request in workload.requests],
        start_ns=0,
        end_ns=max(ends, default=1),
    )

"""Charts over the load: metrics with confidence bands, and differences with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail_lab.experiments.comparison import NOT_DISTINGUISHABLE, Comparison, compare_all
from dovetail_lab.experiments.metric_table import METRICS
from dovetail_lab.experiments.results import Cell, Results
from dovetail_lab.experiments.statistics import mean_interval
from dovetail_lab.reports.figures import color_of, marker_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CURVES = ("ttft_mean", "ttft_p90", "tpot_mean", "e2e_mean", "gap_p90", "throughput")
DIFFERENCES = ("ttft_mean", "tpot_mean", "e2e_mean", "norm_latency", "goodput", "service_gap")
_HEADROOM = 1.08
_WIDE_RATIO = 30
"""A metric whose means differ by more than this factor gets a logarithmic axis."""


def draw_curves(results: Results, engine: str, metrics: Sequence[str] = CURVES) -> Figure | None:
    """Draw one panel per metric: mean over seeds with its confidence band, by load.

    Returns None if there is only one load or no metric has values.
    """
    shown = [name for name in metrics if _has_values(results, engine, name)]
    if not shown or len(results.spec.loads) < 2:
        return None
    num_rows = -(-len(shown) // 3)
    width = min(3, len(shown))
    figure, axes = new_figure(num_rows, width, size=(3.4 * width, 2.7 * num_rows + 0.4))
    for axis, name in zip(axes, shown, strict=False):
        _draw_metric(axis, results, engine, name)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)))
    return figure


def draw_differences(
    results: Results, engine: str, load: float, metrics: Sequence[str] = DIFFERENCES
) -> Figure | None:
    """Draw bars of the relative differences from the baseline at one load, with intervals.

    A hollow bar is not distinguishable from zero. Returns None if there is nothing to compare.
    """
    panels = []
    for name in metrics:
        matches = [item for item in compare_all(results, name, engine) if item.load == load]
        matches = [item for item in matches if item.difference.left]
        if matches and any(item.difference.t.mean for item in matches):
            panels.append((name, matches))
    if not panels:
        return None
    num_rows = -(-len(panels) // 3)
    width = min(3, len(panels))
    height = 0.26 * (len(results.policies) - 1) + 1.1
    figure, axes = new_figure(num_rows, width, size=(3.4 * width, height * num_rows))
    for axis, (name, matches) in zip(axes, panels, strict=False):
        _draw_bars(axis, results, name, matches)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    return figure


def _has_values(results: Results, engine: str, metric: str) -> bool:
    return any(
        results.values(Cell(engine=engine, policy=policy, load=load), metric)
        for policy in results.policies
        for load in results.spec.loads
    )


def _draw_metric(axis: Axes, results: Results, engine: str, metric: str) -> None:
    means: list[float] = []
    for index, policy in enumerate(results.policies):
        points = []
        for load in sorted(results.spec.loads):
            values = results.values(Cell(engine=engine, policy=policy, load=load), metric)
            if values:
                interval = mean_interval(list(values.values()), results.spec.confidence)
                points.append((load, interval))
        if not points:
            continue
        loads = [load for load, _ in points]
        middle = [interval.mean for _, interval in points]
        means += middle
        color = color_of(index)
        axis.plot(loads, middle, color=color, marker=marker_of(index), ms=3.5, label=policy)
        # A band may end below zero, where a logarithmic axis has no points.
        low = [max(interval.low, interval.mean / 10, 0.0) for _, interval in points]
        axis.fill_between(
            loads, low, [interval.high for _, interval in points], color=color, alpha=0.14, lw=0
        )
    info = METRICS[metric]
    axis.set_title(info.label)
    axis.set_ylabel(info.unit or "share")
    axis.set_xlabel("load (fraction of capacity)")
    positive = [value for value in means if value > 0]
    if positive and max(positive) > _WIDE_RATIO * min(positive):
        axis.set_yscale("log")
    else:  # a flat line must not lie on the edge
        axis.set_ylim(0, max(axis.get_ylim()[1], _HEADROOM * max(means, default=0)))


def _draw_bars(
    axis: Axes, results: Results, metric: str, comparisons: Sequence[Comparison]
) -> None:
    order = {name: index for index, name in enumerate(results.policies)}
    for position, item in enumerate(comparisons):
        difference, color = item.difference, color_of(order[item.policy])
        scale = 100 / abs(difference.left)
        value = difference.t.mean * scale
        unclear = item.verdict == NOT_DISTINGUISHABLE
        axis.barh(
            position,
            value,
            height=0.62,
            facecolor="none" if unclear else color,
            edgecolor=color,
            linewidth=1.2,
        )
        if difference.t.num_values > 1:
            low, high = difference.t.low * scale, difference.t.high * scale
            axis.errorbar(
                value,
                position,
                xerr=[[value - low], [high - value]],
                color="#222222",
                capsize=2.5,
                lw=1.1,
            )
    axis.set_yticks(range(len(comparisons)), [item.policy for item in comparisons])
    axis.invert_yaxis()
    axis.axvline(0, color="#444444", lw=0.9)
    axis.grid(axis="y", visible=False)
    info = METRICS[metric]
    axis.set_title(info.label)
    hint = f" ({info.better} is better)" if info.better else ""
    axis.set_xlabel(f"% of {comparisons[0].baseline}{hint}")

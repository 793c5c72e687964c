"""The metrics of a run: name, unit, direction and definition. One table for all outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric. better: "lower" or "higher"; "" if neither low nor high values are better."""

    name: str
    label: str
    unit: str
    better: str
    definition: str


def _latency(name: str, label: str, unit: str, definition: str) -> list[Metric]:
    kinds = {"mean": "mean", "p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
    return [
        Metric(
            name=f"{name}_{kind}",
            label=f"{label}, {words}",
            unit=unit,
            better="lower",
            definition=definition,
        )
        for kind, words in kinds.items()
    ]


def _one(name: str, label: str, unit: str, better: str, definition: str) -> Metric:
    return Metric(name=name, label=label, unit=unit, better=better, definition=definition)


_ALL = [
    *_latency("ttft", "Time to first token", "s", "first token − arrival"),
    *_latency("tpot", "Time per output token", "s", "(end − first token) / (output tokens − 1)"),
    *_latency("e2e", "End-to-end latency", "s", "end − arrival"),
    *_latency("gap", "Largest gap", "s", "longest time between two outputs of a request"),
    _one(
        "norm_latency",
        "Normalized latency",
        "s/token",
        "lower",
        "mean of end-to-end latency / output tokens",
    ),
    _one("wait_mean", "Waiting time, mean", "s", "lower", "first admission − arrival"),
    _one(
        "starvation_age",
        "Longest wait",
        "s",
        "lower",
        "longest time from arrival to admission, or to the end of the run",
    ),
    _one("throughput", "Output throughput", "tokens/s", "higher", "output tokens per second"),
    _one(
        "goodput", "Goodput", "requests/s", "higher", "requests per second that meet all objectives"
    ),
    _one(
        "slo_attainment",
        "SLO attainment",
        "",
        "higher",
        "share of requests that meet all objectives",
    ),
    _one(
        "service_gap",
        "Service difference",
        "tokens",
        "lower",
        "largest difference of the service of two tenants while both have waiting requests",
    ),
    _one(
        "jain",
        "Jain index",
        "",
        "higher",
        "Jain's index of the tenants' service rates while they have waiting requests",
    ),
    _one("preemptions", "Preemptions", "1/request", "lower", "preemptions per request"),
    _one(
        "recompute_share",
        "Recomputed tokens",
        "",
        "lower",
        "tokens recomputed after a preemption / all computed tokens",
    ),
    _one("hit_rate", "Prefix hit rate", "", "higher", "cached prompt tokens / prompt tokens"),
    _one(
        "hit_rate_ideal",
        "Prefix hit rate of an infinite cache",
        "",
        "",
        "prefix hit rate if no block were ever evicted and prompts were computed on arrival",
    ),
    _one("cache_usage", "KV-cache usage", "", "", "blocks in use / blocks, weighted by time"),
    _one("budget_fill", "Budget fill", "", "", "computed tokens / token budget of the steps"),
    _one("scheduler_us", "Scheduler time per step", "µs", "lower", "schedule + update, wall time"),
]

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}
"""All metrics by name, in the order of tables."""

MAIN_METRICS = (
    "ttft_mean",
    "ttft_p99",
    "tpot_mean",
    "e2e_mean",
    "gap_mean",
    "norm_latency",
    "throughput",
    "goodput",
    "slo_attainment",
    "service_gap",
    "preemptions",
    "recompute_share",
    "hit_rate",
)
"""The metrics of the printed table and of the table of winners."""

"""Computes the metrics of a run from its columns.

Requests of the warm-up and of the drain are not measured, but they load the engine. The measured
requests are chosen by their position in the workload, so they are the same for every policy.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail_lab.experiments.fairness import jain_index, max_service_gap, service_curves
from dovetail_lab.experiments.ideal_cache import ideal_hits
from dovetail_lab.experiments.statistics import quantile
from dovetail_lab.simulation.results import NEVER, RequestColumns, RunResult, StepColumns
from dovetail_lab.workloads.workload import WorkloadRequest

NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which requests of a run are measured.

    warmup, drain: shares of the requests at the beginning and at the end that are not measured.
    min_p99: a 99th percentile is reported only for at least this many measured requests.
    """

    warmup: float = 0.1
    drain: float = 0.1
    min_p99: int = 1000

    def bounds(self, count: int) -> tuple[int, int]:
        """Return the range of measured requests of a workload with `count` requests."""
        first = math.floor(count * self.warmup)
        return first, max(first + 1, count - math.floor(count * self.drain))


@dataclass(frozen=True, kw_only=True)
class RunMetrics:
    """The metrics of one run; a metric that cannot be computed is None.

    classes: SLO attainment, goodput and number of requests by class. num_censored: measured
    requests that did not end. num_failed: measured requests that were rejected or failed.
    """

    values: Mapping[str, float | None]
    num_measured: int
    num_censored: int
    num_failed: int
    classes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def measure_run(
    result: RunResult, requests: Sequence[WorkloadRequest], cut: Cut, block_size: int
) -> RunMetrics:
    """Return the metrics of a run. requests: the requests of the workload."""
    columns = result.requests
    first, last = cut.bounds(len(requests))
    measured = range(first, last)
    arrivals = [columns.arrival_ns[i] for i in measured if columns.arrival_ns[i] != NEVER]
    begin_ns, end_ns = (min(arrivals), max(arrivals)) if arrivals else (0, 0)
    series = latency_series(columns, measured)
    values: dict[str, float | None] = {}
    for name, numbers in series.items():
        values |= _summary(name, numbers, cut.min_p99)
    values |= _waits(columns, measured, result.end_ns)
    values["norm_latency"] = _normalized(columns, measured)
    values["throughput"] = _throughput(columns, begin_ns, end_ns)
    values |= _objectives(columns, requests, measured, end_ns - begin_ns)
    values |= _service(columns, requests, begin_ns, end_ns)
    values |= _cache(result, requests, measured, block_size)
    values |= _steps(result, begin_ns, end_ns)
    failed = sum(columns.failed[i] for i in measured)
    open_ = sum(columns.finished_ns[i] == NEVER and not columns.failed[i] for i in measured)
    return RunMetrics(
        values=values,
        num_measured=len(measured),
        num_censored=open_,
        num_failed=failed,
        classes=_by_class(columns, requests, measured, end_ns - begin_ns),
    )


def latency_series(columns: RequestColumns, measured: Sequence[int]) -> dict[str, list[float]]:
    """Return sorted latencies in seconds by metric; infinite for a request that did not end.

    Failed requests have no latencies. Requests with one output token have no time per output token.
    """
    series: dict[str, list[float]] = {name: [] for name in ("ttft", "tpot", "e2e", "gap")}
    for i in measured:
        if columns.failed[i]:
            continue
        arrival, first = columns.arrival_ns[i], columns.first_token_ns[i]
        end, count = columns.finished_ns[i], columns.num_output_tokens[i]
        series["ttft"].append((first - arrival) / NS if first != NEVER else math.inf)
        series["e2e"].append((end - arrival) / NS if end != NEVER else math.inf)
        if end == NEVER:
            series["tpot"].append(math.inf)
        elif count > 1:
            series["tpot"].append((end - first) / (count - 1) / NS)
        if count > 1:
            series["gap"].append(columns.max_gap_ns[i] / NS)
    return {name: sorted(numbers) for name, numbers in series.items()}


def _summary(name: str, numbers: Sequence[float], min_p99: int) -> dict[str, float | None]:
    """Return mean and quantiles. The mean is None if a value is censored."""
    values: dict[str, float | None] = dict.fromkeys(
        (f"{name}_mean", f"{name}_p50", f"{name}_p90", f"{name}_p99")
    )
    if not numbers:
        return values
    values[f"{name}_mean"] = _finite(math.fsum(numbers) / len(numbers))
    values[f"{name}_p50"] = _finite(quantile(numbers, 0.5))
    values[f"{name}_p90"] = _finite(quantile(numbers, 0.9))
    if len(numbers) >= min_p99:
        values[f"{name}_p99"] = _finite(quantile(numbers, 0.99))
    return values


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _waits(
    columns: RequestColumns, measured: Sequence[int], end_ns: int
) -> dict[str, float | None]:
    waits, longest = [], 0.0
    for i in measured:
        arrival, admitted = columns.arrival_ns[i], columns.admitted_ns[i]
        if arrival == NEVER or columns.failed[i]:
            continue
        if admitted != NEVER:
            waits.append((admitted - arrival) / NS)
        longest = max(longest, ((admitted if admitted != NEVER else end_ns) - arrival) / NS)
    mean = math.fsum(waits) / len(waits) if waits else None
    return {"wait_mean": mean, "starvation_age": longest if waits else None}


def _normalized(columns: RequestColumns, measured: Sequence[int]) -> float | None:
    values = [
        (columns.finished_ns[i] - columns.arrival_ns[i]) / columns.num_output_tokens[i] / NS
        for i in measured
        if columns.finished_ns[i] != NEVER and columns.num_output_tokens[i]
    ]
    return math.fsum(values) / len(values) if values else None


def _throughput(columns: RequestColumns, begin_ns: int, end_ns: int) -> float | None:
    """Return output tokens per second between two times.

    A request's tokens count evenly between its first and its last token.
    """
    if end_ns <= begin_ns:
        return None
    total = 0.0
    rows = zip(
        columns.first_token_ns, columns.last_token_ns, columns.num_output_tokens, strict=True
    )
    for first, last, count in rows:
        if first == NEVER:
            continue
        if last <= first:
            total += count if begin_ns <= first <= end_ns else 0
            continue
        inside = min(last, end_ns) - max(first, begin_ns)
        total += count * inside / (last - first) if inside > 0 else 0
    return total / (end_ns - begin_ns) * NS


def meets_objectives(columns: RequestColumns, request: WorkloadRequest, index: int) -> bool:
    """Return whether a request ended without an error and met both objectives."""
    first, end = columns.first_token_ns[index], columns.finished_ns[index]
    if columns.failed[index] or end == NEVER or first == NEVER:
        return False
    count = columns.num_output_tokens[index]
    late = request.ttft_slo_ns and first - columns.arrival_ns[index] > request.ttft_slo_ns
    slow = request.tpot_slo_ns and end - first > request.tpot_slo_ns * (count - 1)
    return not (late or slow)


def _objectives(
    columns: RequestColumns,
    requests: Sequence[WorkloadRequest],
    measured: Sequence[int],
    span_ns: int,
) -> dict[str, float | None]:
    """Return the SLO attainment and the goodput of the requests with an objective."""
    concerned = [i for i in measured if requests[i].ttft_slo_ns or requests[i].tpot_slo_ns]
    if not concerned:
        return {"slo_attainment": None, "goodput": None}
    met = sum(meets_objectives(columns, requests[i], i) for i in concerned)
    goodput = met / span_ns * NS if span_ns > 0 else None
    return {"slo_attainment": met / len(concerned), "goodput": goodput}


def _by_class(
    columns: RequestColumns,
    requests: Sequence[WorkloadRequest],
    measured: Sequence[int],
    span_ns: int,
) -> dict[str, dict[str, float]]:
    groups: dict[str, list[int]] = {}
    for i in measured:
        if requests[i].slo_class:
            groups.setdefault(requests[i].slo_class, []).append(i)
    table = {}
    for name, members in sorted(groups.items()):
        met = sum(meets_objectives(columns, requests[i], i) for i in members)
        table[name] = {
            "requests": float(len(members)),
            "slo_attainment": met / len(members),
            "goodput": met / span_ns * NS if span_ns > 0 else 0.0,
        }
    return table


def _service(
    columns: RequestColumns, requests: Sequence[WorkloadRequest], begin_ns: int, end_ns: int
) -> dict[str, float | None]:
    tenants = [request.tenant for request in requests]
    if len(set(tenants)) < 2 or end_ns <= begin_ns:
        return {"service_gap": None, "jain": None}
    prompts = [request.num_prompt_tokens for request in requests]
    curves = service_curves(columns, tenants, prompts, start_ns=begin_ns, end_ns=end_ns)
    return {"service_gap": max_service_gap(curves), "jain": jain_index(curves)}


def _cache(
    result: RunResult,
    requests: Sequence[WorkloadRequest],
    measured: Sequence[int],
    block_size: int,
) -> dict[str, float | None]:
    columns = result.requests
    prompts = sum(requests[i].num_prompt_tokens for i in measured)
    ideal = ideal_hits(requests, block_size)
    preempted = sum(columns.num_preemptions[i] for i in measured)
    again = sum(columns.num_recomputed_tokens[i] for i in measured)
    computed = again + sum(
        requests[i].num_prompt_tokens - columns.num_cached_tokens[i] + columns.num_output_tokens[i]
        for i in measured
        if columns.admitted_ns[i] != NEVER
    )
    return {
        "preemptions": preempted / len(measured),
        "recompute_share": again / computed if computed else None,
        "hit_rate": sum(columns.num_cached_tokens[i] for i in measured) / prompts,
        "hit_rate_ideal": sum(ideal[i] for i in measured) / prompts,
    }


def _steps(result: RunResult, begin_ns: int, end_ns: int) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "cache_usage": None,
        "budget_fill": None,
        "scheduler_us": result.scheduler_ns / 1e3 if result.scheduler_ns else None,
    }
    steps = result.steps
    if steps is None:
        return values
    inside = [i for i, start in enumerate(steps.start_ns) if begin_ns <= start <= end_ns]
    time = sum(steps.duration_ns[i] for i in inside)
    if time and result.num_blocks:
        used = sum(steps.num_used_blocks[i] * steps.duration_ns[i] for i in inside)
        values["cache_usage"] = used / time / result.num_blocks
    budget = _total(steps.num_steps, inside) * result.max_num_batched_tokens
    if budget:
        values["budget_fill"] = _num_tokens(steps, inside) / budget
    return values


def _num_tokens(steps: StepColumns, inside: Sequence[int]) -> int:
    return _total(steps.num_prefill_tokens, inside) + _total(steps.num_decode_tokens, inside)


def _total(column: array[int], inside: Sequence[int]) -> int:
    return sum(column[i] for i in inside)

"""Summarizes one run of a load test: latencies, rates and goodput."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dovetail.errors import ConfigError
from dovetail_client_tools.load.load_request import NS
from dovetail_client_tools.load.load_run import MS, LoadRecord, RequestTimes

PERCENTILES = (50, 90, 95, 99)
LATENCIES: Mapping[str, str] = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}
SLO_NAMES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Statistics of a latency in milliseconds. percentiles: maps a percentage to its percentile."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The result of a run.

    rate: planned requests per second; infinity for a burst, 0 for a closed loop. concurrency: limit
    of requests in flight; 0 for none. latencies: by the names in `LATENCIES`; a name without values
    is missing. goodput: requests per second that met all objectives; None without objectives.
    send_delay_p99_ms: how late requests were sent.
    """

    rate: float
    concurrency: int
    record: LoadRecord
    duration_s: float
    num_ok: int
    num_failed: int
    request_rate: float
    output_rate: float
    prompt_rate: float
    latencies: Mapping[str, Distribution]
    goodput: float | None
    goodput_share: float | None
    send_delay_p99_ms: float

    @property
    def label(self) -> str:
        """A short label of the load."""
        if not self.rate:
            return f"{self.concurrency} in flight"
        load = "burst" if math.isinf(self.rate) else f"{self.rate:g}/s"
        return f"{load}, ≤ {self.concurrency}" if self.concurrency else load


def read_objectives(text: str) -> dict[str, float]:
    """Return objectives in milliseconds from a string such as "ttft:500,tpot:50"."""
    objectives = {}
    for part in text.split(",") if text else ():
        name, _, number = part.strip().partition(":")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name not in SLO_NAMES or not 0 < value < math.inf:
            raise ConfigError(
                f"--slo {text} must have the form ttft:500,tpot:50,e2e:9000, in milliseconds."
            )
        objectives[name] = value
    return objectives


def summarize(
    record: LoadRecord, *, rate: float, concurrency: int, objectives: Mapping[str, float]
) -> Point:
    """Return the result of a run."""
    ok = [request for request in record.requests if not request.error]
    seconds = max(record.duration_ns, 1) / NS
    values = {name: latency_values(record, name) for name in LATENCIES}
    delays = sorted((item.sent_ns - item.planned_ns) / MS for item in record.requests)
    num_good = sum(meets(item, objectives) for item in ok)
    num_total = len(ok) + record.errors.total()
    return Point(
        rate=rate,
        concurrency=concurrency,
        record=record,
        duration_s=seconds,
        num_ok=len(ok),
        num_failed=record.errors.total(),
        request_rate=len(ok) / seconds,
        output_rate=sum(item.num_output_tokens for item in ok) / seconds,
        prompt_rate=sum(item.num_prompt_tokens for item in ok) / seconds,
        latencies={name: _distribution(items) for name, items in values.items() if items},
        goodput=num_good / seconds if objectives else None,
        goodput_share=num_good / max(1, num_total) if objectives else None,
        send_delay_p99_ms=percentile(delays, 99) if delays else 0.0,
    )


def latency_values(record: LoadRecord, name: str) -> list[float]:
    """Return the latencies of all successful requests, in ms. name: a key of `LATENCIES`."""
    ok = [item for item in record.requests if not item.error]
    if name == "itl":
        return [gap / MS for gap in record.gaps_ns]
    if name == "e2e":
        return [item.e2e_ms for item in ok]
    if name == "tpot":
        return [item.tpot_ms for item in ok if item.has_text and item.num_output_tokens > 1]
    return [item.ttft_ms for item in ok if item.has_text]


def meets(request: RequestTimes, objectives: Mapping[str, float]) -> bool:
    """Return whether a successful request met all objectives."""
    values = {"ttft": request.ttft_ms, "tpot": request.tpot_ms, "e2e": request.e2e_ms}
    is_met = all(values[name] <= limit for name, limit in objectives.items())
    return request.has_text and is_met


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, with linear interpolation."""
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _distribution(values: Sequence[float]) -> Distribution:
    ordered = sorted(values)
    return Distribution(
        count=len(ordered),
        mean=statistics.fmean(ordered),
        std=statistics.pstdev(ordered),
        min=ordered[0],
        max=ordered[-1],
        percentiles={percent: percentile(ordered, percent) for percent in PERCENTILES},
    )

"""Fairness between tenants: service over time, service gaps while both wait, Jain's index.

The service of a tenant is prompt tokens, counted at the first token of a request, plus
`OUTPUT_WEIGHT` times output tokens, counted evenly between the first and the last token. Source of
the weights: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations

from dovetail_lab.simulation.results import NEVER, RequestColumns

OUTPUT_WEIGHT = 2.0
NUM_POINTS = 200


@dataclass(frozen=True, kw_only=True)
class ServiceCurves:
    """The service of each tenant, at regular points in time.

    times_ns: `NUM_POINTS` + 1 times. service: per tenant, the service up to each time. backlogged:
    per tenant and interval between two times, whether a request waited during the whole interval.
    """

    times_ns: Sequence[int]
    service: Mapping[str, Sequence[float]]
    backlogged: Mapping[str, Sequence[bool]]


def service_curves(
    columns: RequestColumns,
    tenants: Sequence[str],
    prompts: Sequence[int],
    *,
    start_ns: int,
    end_ns: int,
) -> ServiceCurves:
    """Return the curves between two times. tenants, prompts: one entry per request."""
    width = max(1, end_ns - start_ns)
    times = [start_ns + width * point // NUM_POINTS for point in range(NUM_POINTS + 1)]
    deltas = {name: [0.0] * (NUM_POINTS + 1) for name in sorted(set(tenants))}
    waits = {name: [0] * (NUM_POINTS + 1) for name in deltas}
    for index, name in enumerate(tenants):
        _add_service(deltas[name], times, columns, index, prompts[index])
        _add_wait(waits[name], times, columns, index)
    return ServiceCurves(
        times_ns=times,
        service={name: list(accumulate(values)) for name, values in deltas.items()},
        backlogged={
            name: [count > 0 for count in list(accumulate(values))[:-1]]
            for name, values in waits.items()
        },
    )


def max_service_gap(curves: ServiceCurves) -> float | None:
    """Return the largest service gap of two tenants while both wait; None if none do."""
    largest: float | None = None
    for left, right in combinations(curves.service, 2):
        both = [
            a and b for a, b in zip(curves.backlogged[left], curves.backlogged[right], strict=True)
        ]
        gaps = [a - b for a, b in zip(curves.service[left], curves.service[right], strict=True)]
        for value in _gaps_while(both, gaps):
            largest = max(largest or 0.0, value)
    return largest


def jain_index(curves: ServiceCurves) -> float | None:
    """Return Jain's index of waiting tenants' service rates; None for fewer than two tenants."""
    rates = []
    for name, waiting in curves.backlogged.items():
        service, count = curves.service[name], sum(waiting)
        gained = sum(service[i + 1] - service[i] for i, waits in enumerate(waiting) if waits)
        if count:
            rates.append(gained / count)
    if len(rates) < 2 or not any(rates):
        return None
    return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates))


def _gaps_while(waiting: Sequence[bool], gaps: Sequence[float]) -> list[float]:
    """Return how far the gap has moved since both began to wait, for each interval of waiting."""
    changes: list[float] = []
    low = high = gaps[0]
    inside = False
    for index, waits in enumerate(waiting):
        if waits and not inside:
            low = high = gaps[index]
        inside = waits
        if waits:
            low, high = min(low, gaps[index + 1]), max(high, gaps[index + 1])
            changes.append(high - low)
    return changes


def _add_service(
    deltas: list[float], times: Sequence[int], columns: RequestColumns, index: int, prompt: int
) -> None:
    first, last = columns.first_token_ns[index], columns.last_token_ns[index]
    count = columns.num_output_tokens[index]
    if first == NEVER or first > times[-1]:
        return
    deltas[bisect_left(times, first)] += prompt
    if last <= first:
        deltas[bisect_left(times, first)] += OUTPUT_WEIGHT * count
        return
    rate = OUTPUT_WEIGHT * count / (last - first)
    begin = bisect_right(times, first)
    for point in range(begin, len(times)):
        low = max(first, times[point - 1]) if point else first
        high = min(last, times[point])
        if high > low:
            deltas[point] += rate * (high - low)
        if times[point] >= last:
            return
    if begin and first < times[0]:
        deltas[0] += rate * (min(last, times[0]) - first)


def _add_wait(waits: list[int], times: Sequence[int], columns: RequestColumns, index: int) -> None:
    """Count the request in the intervals during which it waits from beginning to end."""
    arrival, admitted = columns.arrival_ns[index], columns.admitted_ns[index]
    if arrival == NEVER:
        return
    begin = bisect_left(times, arrival)
    end = len(times) - 1 if admitted == NEVER else bisect_right(times, admitted) - 1
    if begin < end:
        waits[begin] += 1
        waits[end] -= 1

"""Arrival processes: times of arrival with a mean rate, from seeded random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

from dovetail_lab.workloads.spec import ArrivalSpec

NS = 1_000_000_000


def sample_arrivals(spec: ArrivalSpec, count: int, rate: float, rng: Random) -> list[int]:
    """Return `count` times in nanoseconds, sorted; the first is 0.

    rate: mean number of arrivals per second; infinite for all at time 0.
    """
    if spec.process == "burst" or math.isinf(rate):
        return [0] * count
    process = {"gamma": _gamma, "on_off": _on_off, "diurnal": _diurnal}.get(spec.process, _poisson)
    times = list(islice(process(spec, rate, rng), count))
    return [round((time - times[0]) * NS) for time in times]


def scale_arrivals(times: Sequence[int], rate: float) -> list[int]:
    """Return times with the same relative gaps and a mean rate of `rate` per second.

    The first time is 0. If all times are equal, they are spread evenly.
    """
    count = len(times)
    if math.isinf(rate) or count < 2:
        return [0] * count
    span_ns = (count - 1) / rate * NS
    length = times[-1] - times[0]
    if not length:
        return [round(span_ns * index / (count - 1)) for index in range(count)]
    return [round((time - times[0]) * span_ns / length) for time in times]


def _poisson(spec: ArrivalSpec, rate: float, rng: Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def _gamma(spec: ArrivalSpec, rate: float, rng: Random) -> Iterator[float]:
    """Return arrivals with gamma-distributed gaps: mean 1 / rate, CV burstiness ** -0.5."""
    now, scale = 0.0, 1 / (rate * spec.burstiness)
    while True:
        now += rng.gammavariate(spec.burstiness, scale)
        yield now


def _on_off(spec: ArrivalSpec, rate: float, rng: Random) -> Iterator[float]:
    """Return arrivals only in exponentially distributed "on" periods; rate * (on + off) / on."""
    inside = rate * (spec.on_s + spec.off_s) / spec.on_s
    now = 0.0
    left = rng.expovariate(1 / spec.on_s)
    while True:
        gap = rng.expovariate(inside)
        while gap > left:
            gap -= left
            now += left + (rng.expovariate(1 / spec.off_s) if spec.off_s else 0.0)
            left = rng.expovariate(1 / spec.on_s)
        now, left = now + gap, left - gap
        yield now


def _diurnal(spec: ArrivalSpec, rate: float, rng: Random) -> Iterator[float]:
    """Return a Poisson process with rate(t) = rate * (1 + amplitude * sin(2 pi t / period_s))."""
    now, highest = 0.0, rate * (1 + spec.amplitude)
    while True:
        now += rng.expovariate(highest)
        here = rate * (1 + spec.amplitude * math.sin(2 * math.pi * now / spec.period_s))
        if rng.random() * highest <= here:
            yield now

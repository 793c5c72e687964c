"""The requests of a load test, and how they arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

NS = 1_000_000_000
Arrivals = Literal["poisson", "gamma", "constant", "burst"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request.

    number: index in the workload. arrival_ns: time from the start of the run; for a request with a
    parent, the earliest time. num_prompt_tokens, num_output_tokens: intended lengths. parent:
    number of the request whose response must be complete, or -1; the prompt then continues that
    conversation. think_ns: time between the end of the parent and this request. prefix: identities
    of the prompt's first blocks of `block_tokens` tokens; equal identities have equal contents.
    """

    number: int
    arrival_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    parent: int = -1
    think_ns: int = 0
    prefix: tuple[int, ...] = ()
    block_tokens: int = 512
    tenant: str = ""
    priority: int = 0


def sample_arrivals(
    process: Arrivals, count: int, rate: float, *, burstiness: float, seed: int
) -> list[int]:
    """Return `count` sorted times in nanoseconds; the first is 0.

    rate: mean requests per second. burstiness: shape of the gamma distribution; smaller values are
    more bursty, and 1 is Poisson. The random numbers depend only on the seed, so the times of two
    rates are proportional.
    """
    if process == "burst" or math.isinf(rate):
        return [0] * count
    rng = Random(f"{seed} arrivals")
    shape = burstiness if process == "gamma" else 1.0
    now_s, times = 0.0, []
    for _ in range(count):
        times.append(round(now_s * NS))
        gap = 1.0 if process == "constant" else rng.gammavariate(shape, 1 / shape)
        now_s += gap / rate
    return times


def fixed_requests(
    count: int, num_prompt_tokens: int, num_output_tokens: int, times: Sequence[int]
) -> list[LoadRequest]:
    """Return requests of equal length with unique prompts."""
    return [
        LoadRequest(
            number=number,
            arrival_ns=times[number],
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=num_output_tokens,
        )
        for number in range(count)
    ]

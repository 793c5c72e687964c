"""The designed grid of `dovetail lab profile`: workloads that produce steps of every shape.

- decodes: batches of 1 up to all rows, with short and long contexts;
- prompts: single prompts of all lengths with pauses, so that each begins after an idle time;
- mixes: random lengths at once, and random arrivals, so that prompts and decodes share steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

from dovetail.interfaces import SchedulerLimits
from dovetail_lab.workloads.workload import Workload, WorkloadRequest

_MS = 1_000_000
_PAUSE_NS = 4 * _MS
_DECODE_STEPS = 24
_MAX_MIXED, _MIXED_PER_ROW = 48, 8
_MIXED_GAPS_NS = (0, 2 * _MS, 20 * _MS)
"""Mean times between arrivals; 0 for all at the start."""


def design(limits: SchedulerLimits, num_tokens: int, seed: int) -> Sequence[Workload]:
    """Return the workloads of the grid.

    num_tokens: tokens of the KV cache. seed: of the random mixes.
    """
    return [
        *_decode_batches(limits, num_tokens),
        _prompts(limits),
        *_mixes(limits, seed),
    ]


def sizes_up_to(maximum: int) -> Sequence[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, … and `maximum`."""
    sizes, size = set(), 1
    while size <= maximum:
        sizes |= {size, min(maximum, size + size // 2)}
        size *= 2
    return sorted(sizes | {maximum})


def _decode_batches(limits: SchedulerLimits, num_tokens: int) -> Iterator[Workload]:
    longest = limits.max_model_len - _DECODE_STEPS - 1
    contexts = sorted({max(1, longest // part) for part in (16, 4, 2)})
    for batch in sizes_up_to(limits.max_num_seqs):
        for context in contexts:
            if batch * (context + _DECODE_STEPS) <= num_tokens:
                yield _workload(
                    f"{batch} decodes of {context} tokens",
                    [_request(n, 0, context, _DECODE_STEPS) for n in range(batch)],
                )


def _prompts(limits: SchedulerLimits) -> Workload:
    lengths = [size for size in sizes_up_to(limits.max_model_len - 2) if size > 1]
    requests, previous = [], ""
    for number, length in enumerate(lengths):
        request = _request(number, 0, length, 2, parent=previous)
        requests.append(request)
        previous = request.request_id
    return _workload("prompts", requests)


def _mixes(limits: SchedulerLimits, seed: int) -> Iterator[Workload]:
    rng = Random(f"design {seed}")
    longest = limits.max_model_len // 2
    for gap_ns in _MIXED_GAPS_NS:
        requests, time_ns = [], 0
        for number in range(min(_MAX_MIXED, _MIXED_PER_ROW * limits.max_num_seqs)):
            lengths = [round(math.exp(rng.uniform(0, math.log(longest)))) for _ in range(2)]
            requests.append(_request(number, time_ns, lengths[0], max(1, lengths[1] // 2)))
            time_ns += round(rng.expovariate(1 / gap_ns)) if gap_ns else 0
        yield _workload(f"mix {gap_ns}", requests)


def _request(
    number: int, arrival_ns: int, num_prompt: int, num_output: int, parent: str = ""
) -> WorkloadRequest:
    return WorkloadRequest(
        request_id=f"r{number}",
        arrival_ns=arrival_ns,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        max_tokens=num_output,
        parent=parent,
        think_ns=_PAUSE_NS if parent else 0,
    )


def _workload(name: str, requests: Sequence[WorkloadRequest]) -> Workload:
    return Workload(name=name, requests=tuple(requests), fingerprint=name)

"""The workloads of `dovetail lab profile`, which produce steps of every shape.

- decodes: batches that shrink from the maximum size to one request, with contexts up to the
  maximum length. Separate batches of every size would need more prompts;
- prompts: single prompts of all lengths, each after a pause in which the engine is idle;
- mixes: requests of random lengths, in bursts and with random arrivals, so that prompts and decodes
  share steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from dovetail.interfaces import SchedulerLimits
from dovetail_lab.workloads.workload import Workload, WorkloadRequest

_MS = 1_000_000
_PAUSE_NS = 4 * _MS
_CONTEXT_PARTS = 1 / 16, 1 / 4, 1 / 2, 3 / 4, 1.0
_EVERY_SIZE = 32
_LADDER_STEPS, _MIN_RUNG, _SINGLE_STEPS = 96, 4, 24
_MAX_MIXED, _MIXED_PER_ROW = 48, 8
_MIXED_GAPS_NS = (0, 2 * _MS, 20 * _MS)
"""Mean times between arrivals; 0 for all at the start."""


def design(limits: SchedulerLimits, num_tokens: int, seed: int) -> Sequence[Workload]:
    """Return the workloads to measure.

    num_tokens: tokens of the KV cache. seed: the seed of the random mixes.
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
    """Yield batches that shrink to one request, and full batches of the longest requests."""
    sizes = _batch_sizes(limits.max_num_seqs)
    num_steps = [max(_MIN_RUNG, _LADDER_STEPS // len(sizes))] * len(sizes)
    num_steps[0] = max(num_steps[0], _SINGLE_STEPS)
    for part in _CONTEXT_PARTS:
        yield _ladder(limits, num_tokens, part, dict(zip(sizes, num_steps, strict=True)))
    yield _ladder(limits, num_tokens, 1.0, {limits.max_num_seqs: _SINGLE_STEPS})


def _batch_sizes(maximum: int) -> Sequence[int]:
    """Return every size up to `_EVERY_SIZE`, since odd sizes may be slower, then some larger."""
    return sorted({*range(1, min(maximum, _EVERY_SIZE) + 1), *sizes_up_to(maximum)})


def _ladder(
    limits: SchedulerLimits, num_tokens: int, part: float, rungs: Mapping[int, int]
) -> Workload:
    """Return requests of which, after all prompts, `size` decode together for `rungs[size]` steps.

    part: the fraction of the longest prompt with which the requests still fit the model and the
    cache. The requests whose prompts are computed first wait for the others, so they decode longer.
    """
    batch = max(rungs)
    tail, longest = sum(rungs.values()), min(limits.max_model_len, num_tokens // batch) - 1
    per_step = max(1, limits.max_num_batched_tokens - batch)
    joining = min(longest // 2, math.ceil(batch * part * longest / per_step))
    context = max(1, round(part * (longest - joining - tail)))
    requests = []
    for number in range(batch):
        decodes = sum(steps for size, steps in rungs.items() if size > number)
        output = joining * (batch - number) // batch + decodes
        output = max(1, min(output, longest - context))
        requests.append(_request(number, 0, context, output))
    return _workload(f"{batch} decodes of {context} tokens, {tail} steps", requests)


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

"""Creates the requests of synthetic workloads, without arrival times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random

from dovetail_lab.workloads.draft import DraftRequest
from dovetail_lab.workloads.spec import MAX_TOKENS, Component, SessionSpec
from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS

NS = 1_000_000_000
_UNIQUE = 1 << 40
"""Hashes from here on are unique: each belongs to one request."""
_BLOCKS_PER_REQUEST = 1 << 20


def sample_mix(mix: Sequence[Component], count: int, rng: Random) -> list[DraftRequest]:
    """Return `count` requests whose components are chosen by their shares."""
    limits = list(accumulate(component.share for component in mix))
    requests = []
    for index in range(count):
        number = _choose(limits, rng)
        component = mix[number]
        num_prompt = sample_length(component.prompt_tokens, component.prompt_cv, rng)
        hashes: tuple[int, ...] = ()
        if component.prefix_groups:
            group = rng.randrange(component.prefix_groups)
            shared = component.prefix_tokens // HASH_BLOCK_TOKENS
            num_prompt = max(num_prompt, shared * HASH_BLOCK_TOKENS + 1)
            hashes = _hashes(number << 30 | group << 10, shared, index, num_prompt)
        request = DraftRequest(
            num_prompt_tokens=num_prompt,
            num_output_tokens=sample_length(component.output_tokens, component.output_cv, rng),
            tenant=component.tenant,
            priority=component.priority,
            prefix_hashes=hashes,
        )
        requests.append(request)
    return requests


def sample_sessions(spec: SessionSpec, count: int, rng: Random) -> list[DraftRequest]:
    """Return `count` requests of sessions. The turns of a session are consecutive."""
    requests: list[DraftRequest] = []
    session = 0
    while len(requests) < count:
        turns = list(_session(spec, f"s{session}", len(requests), rng))
        requests += turns[: count - len(requests)]
        session += 1
    return requests


def sample_length(mean: float, cv: float, rng: Random) -> int:
    """Return a log-normal length of 1 to `MAX_TOKENS` tokens."""
    if not cv:
        return max(1, round(mean))
    variance = math.log1p(cv * cv)
    length = round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)))
    return min(max(1, length), MAX_TOKENS)


def _session(spec: SessionSpec, name: str, first: int, rng: Random) -> Iterator[DraftRequest]:
    shared = spec.system_tokens // HASH_BLOCK_TOKENS
    num_prompt = sample_length(spec.first_tokens, 0.5, rng)
    num_prompt = max(num_prompt, shared * HASH_BLOCK_TOKENS + 1)
    hashes = _hashes(1 << 39, shared, first, num_prompt) if shared else ()
    num_turns = _geometric(spec.turns, rng)
    for turn in range(num_turns):
        num_output = sample_length(spec.reply_tokens, 1.0, rng)
        think_s = sample_seconds(spec.think_s, spec.think_cv, rng) if turn else 0.0
        yield DraftRequest(
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            session=name,
            parent=first + turn - 1 if turn else -1,
            think_ns=round(think_s * NS),
            prefix_hashes=() if turn else hashes,
        )
        num_prompt += num_output + sample_length(spec.message_tokens, 1.0, rng)


def sample_seconds(mean: float, cv: float, rng: Random) -> float:
    """Return a log-normally distributed time in seconds."""
    if not mean or not cv:
        return mean
    variance = math.log1p(cv * cv)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def _geometric(mean: float, rng: Random) -> int:
    if mean <= 1:
        return 1
    return 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))


def _choose(limits: Sequence[float], rng: Random) -> int:
    """Return an index with a probability proportional to its share."""
    value = rng.random() * limits[-1]
    return next(index for index, limit in enumerate(limits) if value < limit)


def _hashes(group: int, shared: int, index: int, num_prompt: int) -> tuple[int, ...]:
    """Return `shared` hashes of a group, then hashes that only this request has."""
    num_blocks = -(-num_prompt // HASH_BLOCK_TOKENS)
    own = _UNIQUE + index * _BLOCKS_PER_REQUEST
    shared_hashes = range(group, group + shared)
    return (*shared_hashes, *range(own, own + num_blocks - shared))

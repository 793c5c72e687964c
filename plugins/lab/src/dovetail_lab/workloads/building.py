"""Builds the workload of one run, which is the same object for every policy.

Random numbers depend on the seed and on what they are used for, not on the rate. Therefore, a
request has the same lengths, tenant and class at every load.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from random import Random

from dovetail.errors import UserError
from dovetail_lab.workloads.arrivals import sample_arrivals, scale_arrivals
from dovetail_lab.workloads.draft import DraftRequest
from dovetail_lab.workloads.presets import with_preset
from dovetail_lab.workloads.readers.trace_row import TraceRow
from dovetail_lab.workloads.readers.trace_source import FileVersion, TraceSource, find_trace
from dovetail_lab.workloads.spec import SLOClass, WorkloadSpec
from dovetail_lab.workloads.synthetic import sample_mix, sample_sessions
from dovetail_lab.workloads.workload import HASH_BLOCK_TOKENS, Workload, WorkloadRequest

GENERATOR_VERSION = 1
"""Part of the fingerprint. Increase it when a change of the code changes the requests."""
_MS = 1_000_000
_CACHED_TRACES = 4
BURST = math.inf
"""The rate at which all requests arrive at once."""


@dataclass(frozen=True, kw_only=True)
class BuiltWorkload:
    """A workload, and how its requests were changed to fit the engine.

    num_clipped, num_dropped: requests that exceeded the maximum length and were clipped or dropped.
    overlap: whether different seeds use the same rows of the trace.
    """

    workload: Workload
    num_clipped: int = 0
    num_dropped: int = 0
    overlap: bool = False


def build_workload(
    spec: WorkloadSpec, *, rate: float, seed: int, num_seeds: int, max_model_len: int
) -> BuiltWorkload:
    """Return the workload of a seed.

    rate: mean requests per second, or `BURST`. num_seeds: number of seeds of the experiment; each
    seed gets its own range of rows of a trace. max_model_len: maximum tokens per request. Raises
    UserError if the rate is not positive or the trace has too few rows.
    """
    if not rate > 0:
        raise UserError(f"rate={rate!r} must be positive.")
    original, spec = spec, _checked(spec)
    overlap = False
    if spec.trace:
        drafts, overlap = _from_trace(spec, _source(spec), seed, num_seeds)
    elif spec.sessions is not None:
        drafts = sample_sessions(spec.sessions, spec.num_requests, _rng(seed, "sessions"))
    else:
        drafts = sample_mix(spec.mix, spec.num_requests, _rng(seed, "mix"))
    kept, num_clipped = _fit(drafts, spec, max_model_len)
    workload = Workload(
        name=spec.trace or original.synthetic or ("sessions" if spec.sessions else "mix"),
        requests=_finish(kept, spec, rate, seed, max_model_len),
        fingerprint=workload_fingerprint(
            original, rate=rate, seed=seed, num_seeds=num_seeds, max_model_len=max_model_len
        ),
    )
    return BuiltWorkload(
        workload=workload,
        num_clipped=num_clipped,
        num_dropped=len(drafts) - len(kept),
        overlap=overlap,
    )


def workload_fingerprint(
    spec: WorkloadSpec, *, rate: float, seed: int, num_seeds: int, max_model_len: int
) -> str:
    """Return the fingerprint of the workload of `build_workload`, without building it."""
    spec = _checked(spec)
    digest = ""
    if spec.trace:
        source = _source(spec)
        digest = _digest(source, source.version())
    output = [spec.model_dump(), digest, repr(rate), seed, num_seeds, max_model_len]
    text = json.dumps([GENERATOR_VERSION, *output], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _source(spec: WorkloadSpec) -> TraceSource:
    return find_trace(spec.trace, tokenizer=spec.tokenizer)


def _checked(spec: WorkloadSpec) -> WorkloadSpec:
    try:
        return with_preset(spec)
    except ValueError as error:
        raise UserError(f"{error}.") from error


def _rng(seed: int, purpose: str) -> Random:
    return Random(f"{seed} {purpose}")


@lru_cache(maxsize=_CACHED_TRACES)
def _digest(source: TraceSource, version: FileVersion) -> str:
    return source.digest()


@lru_cache(maxsize=_CACHED_TRACES)
def _rows(source: TraceSource, version: FileVersion, start: int, count: int) -> Sequence[TraceRow]:
    return tuple(source.rows(start, count))


def _from_trace(
    spec: WorkloadSpec, source: TraceSource, seed: int, num_seeds: int
) -> tuple[list[DraftRequest], bool]:
    """Return the rows of a seed, and whether seeds share rows.

    Seeds use consecutive ranges of rows. If the trace is too short, the ranges overlap and are
    evenly spaced.
    """
    count = spec.num_requests
    rows = _rows(source, source.version(), spec.first_row, count * num_seeds)
    if len(rows) < count:
        raise UserError(
            f"the trace {spec.trace!r} has {len(rows):,} rows from row {spec.first_row}; "
            f"num_requests={count} needs more. Use a smaller number."
        )
    stride = min(count, (len(rows) - count) // max(1, num_seeds - 1)) if num_seeds > 1 else count
    start = (seed % num_seeds) * stride
    return _linked(rows[start : start + count]), num_seeds > 1 and stride < count


def _linked(rows: Sequence[TraceRow]) -> list[DraftRequest]:
    """Convert rows to requests, and link the turns of each session.

    If the prompt of a turn is longer than the previous turn's prompt and output together, the turn
    arrives only after the previous turn has finished.
    """
    last: dict[str, int] = {}
    drafts: list[DraftRequest] = []
    for index, row in enumerate(rows):
        before = last.get(row.session, -1) if row.session else -1
        if before >= 0:
            earlier = drafts[before]
            length = earlier.num_prompt_tokens + earlier.num_output_tokens
            before = before if row.turn and row.num_prompt_tokens > length else -1
        draft = DraftRequest(
            num_prompt_tokens=row.num_prompt_tokens,
            num_output_tokens=row.num_output_tokens,
            arrival_ns=row.arrival_ns,
            tenant=row.tenant,
            priority=row.priority,
            session=row.session,
            parent=before,
            max_tokens=row.max_tokens,
            prefix_hashes=row.prefix_hashes,
        )
        drafts.append(draft)
        if row.session:
            last[row.session] = index
    return drafts


def _fit(
    drafts: Sequence[DraftRequest], spec: WorkloadSpec, max_model_len: int
) -> tuple[list[DraftRequest], int]:
    """Clip or drop requests that are too long. Return the requests and the number of clipped ones.

    A request whose parent was dropped does not wait for it.
    """
    kept: list[DraftRequest] = []
    places: dict[int, int] = {-1: -1}
    num_clipped = 0
    for index, draft in enumerate(drafts):
        parent = places.get(draft.parent, -1)
        if draft.num_prompt_tokens + draft.num_output_tokens <= max_model_len:
            fitted = replace(draft, parent=parent)
        elif spec.too_long == "drop":
            continue
        else:
            num_clipped += 1
            num_output = min(draft.num_output_tokens, max(1, max_model_len // 2))
            num_prompt = min(draft.num_prompt_tokens, max_model_len - num_output)
            num_blocks = len(draft.prefix_hashes) and -(-num_prompt // HASH_BLOCK_TOKENS)
            fitted = replace(
                draft,
                parent=parent if num_prompt == draft.num_prompt_tokens else -1,
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                prefix_hashes=draft.prefix_hashes[:num_blocks],
            )
        places[index] = len(kept)
        kept.append(fitted)
    if not kept:
        raise UserError(f"every request is longer than max_model_len={max_model_len}.")
    return kept, num_clipped


def _finish(
    drafts: Sequence[DraftRequest], spec: WorkloadSpec, rate: float, seed: int, max_model_len: int
) -> list[WorkloadRequest]:
    """Return the requests with times, tenants, classes and limits, in the order of arrival."""
    times = _times(drafts, spec, rate, seed)
    tenants = _tenants(drafts, spec, _rng(seed, "tenants"))
    classes = _classes(drafts, spec.slo_classes, _rng(seed, "classes"))
    limit = spec.max_tokens or _power_of_two(max(item.num_output_tokens for item in drafts))
    estimates, requests = _rng(seed, "estimates"), []
    for index, draft in enumerate(drafts):
        slo = classes[index]
        room = max_model_len - draft.num_prompt_tokens
        request = WorkloadRequest(
            request_id=f"r{index}",
            arrival_ns=times[index],
            num_prompt_tokens=draft.num_prompt_tokens,
            num_output_tokens=min(draft.num_output_tokens, room),
            max_tokens=min(max(draft.max_tokens or limit, draft.num_output_tokens), room),
            tenant=tenants[index],
            priority=slo.priority if slo else draft.priority,
            session=draft.session,
            parent=f"r{draft.parent}" if draft.parent >= 0 else "",
            think_ns=0 if math.isinf(rate) else draft.think_ns,
            prefix_hashes=draft.prefix_hashes,
            slo_class=slo.name if slo else "",
            expected_tokens=_estimate(draft, spec.expected_tokens, estimates),
            ttft_slo_ns=round(slo.ttft_ms * _MS) if slo else 0,
            tpot_slo_ns=round(slo.tpot_ms * _MS) if slo else 0,
        )
        requests.append(request)
    return sorted(requests, key=lambda request: request.arrival_ns)


def _times(drafts: Sequence[DraftRequest], spec: WorkloadSpec, rate: float, seed: int) -> list[int]:
    """Return the arrival times; only the first request of a session counts for the rate."""
    starts = [index for index, draft in enumerate(drafts) if draft.parent < 0]
    rate *= len(starts) / len(drafts)
    if spec.arrivals.process in ("", "trace") and spec.trace:
        sampled = scale_arrivals([drafts[index].arrival_ns for index in starts], rate)
    else:
        rng = _rng(seed, "arrivals")
        sampled = sample_arrivals(spec.arrivals, len(starts), rate, rng)
    times = dict(zip(starts, sampled, strict=True))
    for index, draft in enumerate(drafts):
        if draft.parent >= 0:
            times[index] = times[draft.parent]
    return [times[index] for index in range(len(drafts))]


def _tenants(drafts: Sequence[DraftRequest], spec: WorkloadSpec, rng: Random) -> list[str]:
    """Return the tenant of each request; a session has one tenant."""
    if not spec.tenants:
        return [draft.tenant for draft in drafts]
    weights = [1 / (rank + 1) ** spec.tenant_skew for rank in range(spec.tenants)]
    limits = list(accumulate(weights))
    numbers = rng.choices(range(spec.tenants), cum_weights=limits, k=len(drafts))
    for index, draft in enumerate(drafts):
        if draft.parent >= 0:
            numbers[index] = numbers[draft.parent]
    return [f"tenant {number}" for number in numbers]


def _classes(
    drafts: Sequence[DraftRequest], classes: Sequence[SLOClass], rng: Random
) -> Sequence[SLOClass | None]:
    if not classes:
        return [None] * len(drafts)
    limits = list(accumulate(item.share for item in classes))
    chosen = rng.choices(classes, cum_weights=limits, k=len(drafts))
    for index, draft in enumerate(drafts):
        if draft.parent >= 0:
            chosen[index] = chosen[draft.parent]
    return chosen


def _estimate(draft: DraftRequest, kind: str, rng: Random) -> int:
    if kind == "none":
        return 0
    if kind == "exact":
        return draft.num_output_tokens
    sigma = float(kind.partition(":")[2])
    return max(1, round(draft.num_output_tokens * math.exp(rng.gauss(0.0, sigma))))


def _power_of_two(number: int) -> int:
    return 1 << max(0, (number - 1).bit_length())

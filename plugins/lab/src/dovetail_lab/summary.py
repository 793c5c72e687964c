"""Computes counts from a decision log. This module does not construct a scheduler."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dovetail.decision_log import (
    LoggedPlan,
    LogHeader,
    LogReader,
    PlanDecoder,
    Record,
    RecordKind,
    decode_names,
    decode_output,
    decode_request,
    split_readings,
)
from dovetail.errors import UserError
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput

DECODE_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    *(struct.error, StopIteration),
)
"""The exceptions that decoding a crafted record can raise."""


@dataclass(slots=True)
class Summary:
    """The counts of a log.

    num_prompt_tokens: prompt tokens of all admitted requests. num_cached_tokens: prompt tokens
    found in the prefix cache at the first admission of a request. num_tokens: scheduled tokens.
    num_sampled: sampled tokens. num_preemptions: number of times that a preempted request was
    admitted again.
    """

    header: LogHeader
    num_steps: int = 0
    num_empty_steps: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_preemptions: int = 0
    num_grants: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    first_ns: int = 0
    last_ns: int = 0
    num_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the prompt tokens that were found in the cache; 0 without prompt tokens."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class LogObserver:
    """Receives the content of a log while it is summarized. These methods do nothing.

    now_ns: the time of the call that was recorded, in nanoseconds; for plans and results, the first
    reading of the clock.
    """

    def add_plan(self, plan: LoggedPlan, now_ns: int) -> None:
        """Receive a plan."""

    def add_request(self, request: EngineCoreRequest, now_ns: int) -> None:
        """Receive an added request."""

    def add_abort(self, request_ids: Sequence[str], now_ns: int) -> None:
        """Receive the ids of aborted requests."""

    def add_output(self, output: ModelRunnerOutput, now_ns: int) -> None:
        """Receive the result of a step."""


def summarize(reader: LogReader, observer: LogObserver) -> Summary:
    """Read a whole log and return its counts. The observer receives the records in order.

    Raises UserError if the log cannot be read.
    """
    records = iter(reader)
    first = next(records, None)
    if first is None or first.kind is not RecordKind.HEADER:
        raise UserError(
            f"{str(reader.path)!r} has no header, so it contains no steps. Record a new log."
        )
    try:
        summary = Summary(LogHeader.decode(split_readings(first.payload)[1]))
        counter = _Counter(summary, observer)
        for record in records:
            counter.add(record)
    except UserError:
        raise
    except DECODE_ERRORS as error:
        raise UserError(
            f"{str(reader.path)!r} has a record that cannot be decoded: "
            f"{type(error).__name__}. It is not a log of this version. Record a new log."
        ) from error
    summary.num_bytes = reader.path.stat().st_size
    return summary


class _Counter:
    """Counts records and passes them to an observer."""

    def __init__(self, summary: Summary, observer: LogObserver) -> None:
        self._summary = summary
        self._observer = observer
        self._plans = PlanDecoder()
        self._joined: set[str] = set()

    def add(self, record: Record) -> None:
        """Add the next record."""
        summary, observer = self._summary, self._observer
        readings, payload = split_readings(record.payload)
        if readings:
            summary.first_ns = summary.first_ns or readings[0]
            summary.last_ns = readings[-1]
        now_ns = readings[0] if readings else summary.last_ns
        if record.kind is RecordKind.PLAN:
            plan = self._plans.decode(payload)
            _add_plan(summary, plan, self._joined)
            observer.add_plan(plan, now_ns)
        elif record.kind is RecordKind.ADD:
            request = decode_request(payload)
            summary.num_requests += 1
            self._joined.discard(request.request_id)
            observer.add_request(request, now_ns)
        elif record.kind is RecordKind.ABORT:
            names = decode_names(payload)
            summary.num_aborted += len(names)
            observer.add_abort(names, now_ns)
        elif record.kind is RecordKind.OUTPUT:
            output = decode_output(payload)
            summary.num_sampled += sum(output.num_sampled)
            observer.add_output(output, now_ns)


def _add_plan(summary: Summary, plan: LoggedPlan, joined: set[str]) -> None:
    summary.num_steps += 1
    summary.num_empty_steps += not plan.rows
    summary.num_grants += len(plan.rows)
    summary.num_tokens += sum(plan.num_tokens)
    starts = dict(zip(plan.rows, plan.starts, strict=True)) if plan.joins else {}
    for join in plan.joins:
        if join.request_id in joined:
            summary.num_preemptions += 1
            continue
        joined.add(join.request_id)
        summary.num_prompt_tokens += join.num_prompt_tokens
        summary.num_cached_tokens += starts.get(join.row, 0)


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return names and values of the counts, for a table."""
    header, covered_s = summary.header, (summary.last_ns - summary.first_ns) / 1e9
    num_steps = max(1, summary.num_steps)
    limits = ", ".join(f"{name} {value}" for name, value in asdict(header.limits).items() if value)
    shares = summary.num_cached_tokens, summary.num_prompt_tokens
    return [
        ("scheduler", header.scheduler),
        ("policy", header.policy or "built into the scheduler"),
        ("limits", limits),
        ("KV blocks", f"{header.kv_cache.num_blocks - 1} of {header.kv_cache.block_size} tokens"),
        ("steps", f"{summary.num_steps:,}, {summary.num_empty_steps:,} without tokens"),
        ("time", f"{covered_s:.3f} s"),
        ("requests", f"{summary.num_requests:,}, {summary.num_aborted:,} aborted"),
        ("grants", f"{summary.num_grants:,}, {summary.num_grants / num_steps:.1f} per step"),
        ("tokens", f"{summary.num_tokens:,} computed, {summary.num_sampled:,} sampled"),
        ("preemptions", f"{summary.num_preemptions:,}, counted when a request is readmitted"),
        ("prefix hits", f"{summary.hit_rate:.1%} ({shares[0]:,} of {shares[1]:,} prompt tokens)"),
        ("size", f"{summary.num_bytes:,} bytes, {summary.num_bytes / num_steps:.0f} per step"),
    ]

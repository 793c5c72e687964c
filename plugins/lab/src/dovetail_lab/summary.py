"""Computes counts from a decision log. Does not construct a scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


def summarize(reader: LogReader, on_plan: Callable[[LoggedPlan, int], None]) -> Summary:
    """Read a whole log and return its counts.

    on_plan: called with each plan and the time at which its scheduling started, in nanoseconds.
    Raises UserError if the log cannot be read.
    """
    records = iter(reader)
    first = next(records, None)
    if first is None or first.kind is not RecordKind.HEADER:
        raise UserError(
            f"{str(reader.path)!r} has no header, so it contains no steps. Record a new log."
        )
    summary = Summary(LogHeader.decode(split_readings(first.payload)[1]))
    plans, joined = PlanDecoder(), set[str]()
    for record in records:
        readings, payload = split_readings(record.payload)
        if readings:
            summary.first_ns = summary.first_ns or readings[0]
            summary.last_ns = readings[-1]
        if record.kind is RecordKind.PLAN:
            plan = plans.decode(payload)
            _add_plan(summary, plan, joined)
            on_plan(plan, readings[0] if readings else summary.last_ns)
        else:
            _add_event(summary, Record(kind=record.kind, payload=payload), joined)
    summary.num_bytes = reader.path.stat().st_size
    return summary


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


def _add_event(summary: Summary, record: Record, joined: set[str]) -> None:
    if record.kind is RecordKind.ADD:
        summary.num_requests += 1
        joined.discard(decode_request(record.payload).request_id)
    elif record.kind is RecordKind.ABORT:
        summary.num_aborted += len(decode_names(record.payload))
    elif record.kind is RecordKind.OUTPUT:
        summary.num_sampled += sum(decode_output(record.payload).num_sampled)

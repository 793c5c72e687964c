"""The result of running a workload: times and counts per request and for the whole run.

The simulator and the real engine return the same type, so that metrics and reports treat both
alike.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

NEVER = -1
"""Stands for the time of an event that did not happen."""


def _int64() -> array[int]:
    return array("q")


@dataclass(kw_only=True)
class RequestColumns:
    """One entry per request, in the order of the workload; all arrays are int64.

    arrival_ns: actual time of arrival (`NEVER` if the parent did not end). admitted_ns: first
    admission. first_token_ns, last_token_ns: times of the outputs. finished_ns: the end; `NEVER`
    for a request that was still unfinished. Times are nanoseconds from the start of the workload.
    num_output_tokens: generated tokens. max_gap_ns: the longest time between two consecutive
    outputs; 0 for fewer than two. num_cached_tokens: prompt tokens found in the prefix cache at the
    first admission. num_preemptions, num_recomputed_tokens: see `SchedulerStats`. failed: 1 for a
    request that was rejected or ended with an error.
    """

    arrival_ns: array[int] = field(default_factory=_int64)
    admitted_ns: array[int] = field(default_factory=_int64)
    first_token_ns: array[int] = field(default_factory=_int64)
    last_token_ns: array[int] = field(default_factory=_int64)
    finished_ns: array[int] = field(default_factory=_int64)
    num_output_tokens: array[int] = field(default_factory=_int64)
    max_gap_ns: array[int] = field(default_factory=_int64)
    num_cached_tokens: array[int] = field(default_factory=_int64)
    num_preemptions: array[int] = field(default_factory=_int64)
    num_recomputed_tokens: array[int] = field(default_factory=_int64)
    failed: array[int] = field(default_factory=_int64)


@dataclass(kw_only=True)
class StepColumns:
    """One entry per step, or per stretch of equal steps; all arrays are int64.

    start_ns: when the step starts. duration_ns: its time on the device and the host together.
    num_steps: 1, or the number of decode steps that a macro step covers (duration_ns is their sum).
    num_prefill_tokens, num_decode_tokens: computed tokens.
    num_running, num_waiting, num_used_blocks: counts after the step.
    """

    start_ns: array[int] = field(default_factory=_int64)
    duration_ns: array[int] = field(default_factory=_int64)
    num_steps: array[int] = field(default_factory=_int64)
    num_prefill_tokens: array[int] = field(default_factory=_int64)
    num_decode_tokens: array[int] = field(default_factory=_int64)
    num_running: array[int] = field(default_factory=_int64)
    num_waiting: array[int] = field(default_factory=_int64)
    num_used_blocks: array[int] = field(default_factory=_int64)


@dataclass(kw_only=True)
class RunResult:
    """The result of one run.

    steps: None unless requested. num_steps: engine steps, each step of a macro step counted.
    num_request_steps: sum over the steps of their scheduled requests. host_ns: wall time that the
    run took. scheduler_ns: mean wall time per step of planning it and of processing its result; 0
    if not measured.
    num_blocks: KV blocks of the engine. prefix_queries, prefix_hits, num_preemptions,
    num_recomputed_tokens, num_idle_steps: totals of `SchedulerStats`. error: why the run failed;
    "" for a complete run. The columns of a failed run end at the failure.
    """

    requests: RequestColumns
    steps: StepColumns | None
    num_steps: int
    num_request_steps: int
    end_ns: int
    host_ns: int
    scheduler_ns: int
    num_blocks: int
    max_num_batched_tokens: int
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_idle_steps: int = 0
    error: str = ""

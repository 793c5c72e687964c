"""The records of a step trace: plain data, which the engine and the server send unchanged.

A record contains counts, times and numbers of requests. It contains no request ids, prompts or
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from dovetail.interfaces.scheduler import SchedulerStats

MAX_STEPS = 1024
"""Number of steps that the engine stores, and maximum of steps per call of `read_steps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What happened in one step.

    A request has the same number in all records of a trace; a number is never reused.
    number: the number of this record, from 1, without gaps. step_id: the id of the plan. Times are
    in nanoseconds of the engine's clock: begin_ns before the step was planned, planned_ns after
    that, end_ns after its result was processed; with asynchronous scheduling a step begins before
    the previous one ends. num_tokens, num_new_tokens: computed and generated tokens of all
    requests. num_waiting, num_running, num_used_blocks, num_preemptions: statistics after the step.
    joined: (request, prompt tokens, known tokens) for each request that got a batch slot. After a
    preemption the known tokens include generated ones. prefills: (request, first position, tokens)
    for each chunk of known tokens. The positions before the first chunk were found in the prefix
    cache. decodes: the requests that computed one generated token each; None for the same requests
    as in the previous record of the same trace. verified: (request, tokens, drafts) for each
    request with draft tokens. preempted: requests that lost their batch slot in this step, and wait
    again. ended: (request, reason) with the reason "stop", "length", "abort", "error", or "" for a
    request that started before the recording and ended for an unknown reason.
    """

    number: int
    step_id: int
    begin_ns: int
    planned_ns: int
    end_ns: int
    num_tokens: int
    num_new_tokens: int
    num_waiting: int = 0
    num_running: int = 0
    num_used_blocks: int = 0
    num_preemptions: int = 0
    joined: tuple[tuple[int, int, int], ...] = ()
    prefills: tuple[tuple[int, int, int], ...] = ()
    decodes: tuple[int, ...] | None = ()
    verified: tuple[tuple[int, int, int], ...] = ()
    preempted: tuple[int, ...] = ()
    ended: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """The recorded steps after a given one.

    started_ns: when the recording started. If it differs from that of the previous trace, the
    engine or the recording was started again: numbers of records and requests start at 1 again.
    now_ns: the engine's clock. after: number of the record before the first one in `steps`. If it
    is larger than requested, the records between were dropped. num_steps: number of the latest
    record; if it is larger than that of the last one in `steps`, later calls return the rest.
    num_computed_tokens, num_new_tokens: computed and generated tokens since the recording started.
    stats: the scheduler's statistics of the latest step, or None before the first.
    """

    started_ns: int
    now_ns: int
    after: int
    num_steps: int
    num_computed_tokens: int = 0
    num_new_tokens: int = 0
    stats: SchedulerStats | None = None
    steps: tuple[StepRecord, ...] = ()

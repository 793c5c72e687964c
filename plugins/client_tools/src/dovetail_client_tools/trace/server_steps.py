"""Reads the steps of a running server for a given time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from dovetail.clock import Clock
from dovetail_client_tools.engine_steps.reader import StepsError, StepsReader
from dovetail_client_tools.engine_steps.records import Steps
from dovetail_client_tools.trace.slices import TraceBuilder

PERIOD_S = 0.25
_NS = 1_000_000_000


@dataclass(kw_only=True)
class ServerTrace:
    """The steps that were read. num_missed: steps that the engine dropped before they were read.

    problem: why the trace ended early, or "". policy: the policy in the latest step.
    """

    model: str = ""
    policy: str = ""
    num_steps: int = 0
    num_missed: int = 0
    problem: str = ""


async def follow(
    reader: StepsReader, builder: TraceBuilder, duration_s: float, clock: Clock, result: ServerTrace
) -> None:
    """Pass the steps of `duration_s` seconds to a builder.

    result: updated after each read, so that it is valid after an interruption, too. Raises
    StepsError if the first read fails; later errors end the trace.
    """
    result.model = (await reader.names()).model
    trace = await reader.read(0)
    started_ns, after = trace.started_ns, trace.num_steps
    end_ns = clock.now_ns() + int(duration_s * _NS)
    is_last = False
    while not is_last:
        remaining_s = (end_ns - clock.now_ns()) / _NS
        is_last = remaining_s <= PERIOD_S
        await asyncio.sleep(max(0.0, min(PERIOD_S, remaining_s)))
        is_complete = False
        while not is_complete:
            try:
                trace = await reader.read(after)
            except StepsError as error:
                result.problem = str(error)
                return
            if trace.started_ns != started_ns:
                result.problem = "The engine was restarted, so the trace ends before the restart."
                return
            before, after = after, _add(trace, after, builder, result)
            is_complete = after == before or after >= trace.num_steps


def _add(trace: Steps, after: int, builder: TraceBuilder, result: ServerTrace) -> int:
    """Add the steps of a response. Return the number of the last one."""
    result.num_missed += max(0, trace.after - after)
    if trace.stats is not None:
        result.policy = trace.stats.policy
    for step in trace.steps:
        if step.number <= after:
            continue  # otherwise, repeated numbers would cause an endless loop
        builder.add(step)
        result.num_steps += 1
        after = step.number
    return after

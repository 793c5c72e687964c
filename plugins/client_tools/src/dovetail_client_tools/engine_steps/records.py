"""The response of the route /steps, with checked types and bounded numbers.

Field names and meanings are those of `dovetail.engine.step_trace.records`. Unknown fields of a
newer server are ignored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""A number that a double represents exactly, so that JavaScript and rates can use it."""
Word = Annotated[str, msgspec.Meta(max_length=200)]


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of the scheduler that are shown."""

    num_waiting: Count = 0
    num_running: Count = 0
    prefix_queries: Count = 0
    prefix_hits: Count = 0
    num_preemptions: Count = 0
    num_blocks: Count = 0
    num_used_blocks: Count = 0
    policy: Word = ""
    policy_failures: Count = 0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as in `StepRecord`."""

    number: Count
    step_id: Count
    begin_ns: Count
    end_ns: Count
    num_tokens: Count
    num_new_tokens: Count
    num_waiting: Count = 0
    num_running: Count = 0
    num_used_blocks: Count = 0
    joined: tuple[tuple[Count, Count, Count], ...] = ()
    prefills: tuple[tuple[Count, Count, Count], ...] = ()
    decodes: tuple[Count, ...] | None = ()
    verified: tuple[tuple[Count, Count, Count], ...] = ()
    preempted: tuple[Count, ...] = ()
    ended: tuple[tuple[Count, Word], ...] = ()

    @property
    def duration_ns(self) -> int:
        """The time from the beginning of the step to its end; 0 if the two are in wrong order."""
        return max(0, self.end_ns - self.begin_ns)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prompt tokens that the step computed."""
        return sum(num_tokens for _, _, num_tokens in self.prefills)


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """The response of the route, as in `StepTrace`."""

    started_ns: Count
    now_ns: Count
    after: Count
    num_steps: Count
    num_computed_tokens: Count = 0
    num_new_tokens: Count = 0
    stats: Stats | None = None
    steps: tuple[Step, ...] = ()

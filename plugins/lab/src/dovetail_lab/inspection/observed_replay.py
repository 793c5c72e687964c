"""Replays a decision log up to a step and observes this step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.decision_log import (
    LogHeader,
    LogReader,
    RecordKind,
    decode_names,
    split_readings,
)
from dovetail.errors import UserError
from dovetail.plan import SchedulerOutput
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail_lab.inspection.step_view import StepObserver, StepView
from dovetail_lab.replay import ReplayedScheduler


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """A step of a replay.

    scheduler: its name. view: the view and the actions of its policy. granted: tokens by request
    id. known: requests that were added before the step. ended: requests that ended or were
    aborted before the step.
    """

    scheduler: str
    header: LogHeader
    view: StepView
    granted: Mapping[str, int]
    known: frozenset[str]
    ended: frozenset[str]


class _History:
    """The requests of a replay up to the current record."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.ended: set[str] = set()
        self._rows: dict[int, str] = {}

    def note(self, replayed: ReplayedScheduler, kind: RecordKind, payload: bytes) -> None:
        """Add the changes of a record."""
        if kind is RecordKind.ADD and replayed.last_request is not None:
            self.known.add(replayed.last_request.request_id)
        elif kind is RecordKind.ABORT:
            self.ended.update(decode_names(payload))
        elif kind is RecordKind.PLAN and replayed.last_plan is not None:
            self._rows |= {join.row: join.request_id for join in replayed.last_plan.joins}
        elif kind is RecordKind.OUTPUT and replayed.last_outputs is not None:
            self.ended |= {item.request_id for item in replayed.last_outputs.finished}

    def granted(self, plan: SchedulerOutput) -> dict[str, int]:
        """Return the tokens of each request in the last plan."""
        granted: Counter[str] = Counter()
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            granted[self._rows[row]] += count
        return dict(granted)


def observe_step(
    path: Path, step: int, *, scheduler: str = "", trust_local_code: bool = False
) -> ObservedStep:
    """Return a step of a log, planned by the recorded or another scheduler.

    Raises UserError if the log has no such step, or if the scheduler makes a different plan before
    it.
    """
    reader = LogReader(path)
    records = iter(reader)
    first = next(records, None)
    if first is None or first.kind is not RecordKind.HEADER:
        raise UserError(f"{str(path)!r} has no header, so it contains no steps. Record a new log.")
    readings, payload = split_readings(first.payload)
    registry = PluginRegistry(policy=PluginPolicy(trust_local_code=trust_local_code))
    observer, header = StepObserver(step), LogHeader.decode(payload)
    replayed = ReplayedScheduler(header, readings, scheduler, registry, observe=observer.observe)
    history = _History()
    for record in records:
        readings, payload = split_readings(record.payload)
        replayed.clock.feed(readings)
        at_step = record.kind is RecordKind.PLAN and replayed.num_steps == step
        difference = replayed.step(record.kind, payload)
        history.note(replayed, record.kind, payload)
        if at_step and replayed.last_plan is not None:
            return _observed(replayed, header, observer, history)
        if difference is not None:
            raise UserError(
                f"{replayed.name} makes a different plan in step {difference.step}, so step {step} "
                "of the log cannot be replayed with it."
            )
    raise UserError(f"step {step} is not in the log: it has {replayed.num_steps:,} steps, from 0.")


def _observed(
    replayed: ReplayedScheduler, header: LogHeader, observer: StepObserver, history: _History
) -> ObservedStep:
    if observer.view is None or replayed.last_plan is None:
        raise UserError(
            f"the policy of {replayed.name} did not plan this step: the scheduler is paused, or it "
            "is not the core's scheduler."
        )
    return ObservedStep(
        scheduler=replayed.name,
        header=header,
        view=observer.view,
        granted=history.granted(replayed.last_plan),
        known=frozenset(history.known),
        ended=frozenset(history.ended),
    )

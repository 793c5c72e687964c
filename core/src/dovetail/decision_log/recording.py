"""A scheduler that writes down what it is told and what it decides.

It wraps any scheduler and its clock, so one that is not recorded knows nothing of logs. What comes
from outside the calls of the contract (gates, a KV connector) cannot be replayed and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from dovetail.clock import Clock
from dovetail.decision_log.encoding import (
    Codebooks,
    encode_names,
    encode_output,
    encode_request,
    with_readings,
)
from dovetail.decision_log.header import LogHeader
from dovetail.decision_log.log_file import LogWriter, RecordKind
from dovetail.decision_log.plan_records import PlanEncoder
from dovetail.errors import ConfigError, DovetailError
from dovetail.interfaces.scheduler import (
    Depth,
    EngineCoreOutputs,
    PauseScope,
    SchedulerContext,
    SchedulerInterface,
)
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput


class RecordingClock:
    """A clock that remembers what it told since the last record."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.readings: list[int] = []

    def now_ns(self) -> int:
        """Return the time in nanoseconds, and keep it."""
        now = self._clock.now_ns()
        self.readings.append(now)
        return now


class DecisionRecorder:
    """Writes the records of one scheduler's life to a file."""

    def __init__(
        self, path: Path, scheduler_cls: type[SchedulerInterface], context: SchedulerContext
    ) -> None:
        """Begin the log of a scheduler that is to be made from `self.context`.

        Raises ConfigError, naming `decision_log`, if it cannot be written, or if the scheduler
        cannot be recorded.
        """
        if context.gates or context.kv_connector is not None:
            raise ConfigError(
                "decision_log cannot record a scheduler with gates or a KV connector: what those "
                "answer is not replayed; leave one of the two out."
            )
        try:
            self._header = LogHeader.of(scheduler_cls, context).encode()
        except TypeError as error:
            raise ConfigError(f"decision_log cannot keep a plugin's options: {error}.") from error
        self._clock = RecordingClock(context.clock)
        self.context = replace(context, clock=self._clock)
        self._codes = Codebooks()
        self._plans = PlanEncoder(self._codes.tokens, self._codes.contents)
        self._log = LogWriter(path)

    def made(self) -> None:
        """Write the header: the scheduler has been made."""
        self._append(RecordKind.HEADER, self._header)

    def added(self, request: EngineCoreRequest) -> None:
        """Write that a request is added."""
        self._append(RecordKind.ADD, encode_request(request, self._codes))

    def told(self, kind: RecordKind, *names: str) -> None:
        """Write a call whose arguments are names."""
        self._append(kind, encode_names(names))

    def planned(self, plan: SchedulerOutput) -> None:
        """Write a plan."""
        self._append(RecordKind.PLAN, self._plans.encode(plan))

    def settled(self, output: ModelRunnerOutput) -> None:
        """Write a step's result."""
        self._append(RecordKind.OUTPUT, encode_output(output, self._codes.tokens))

    def forget(self) -> None:
        """Write nothing of a call that was refused, nor that it took the time."""
        self._clock.readings.clear()

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        self._log.close()

    def _append(self, kind: RecordKind, payload: bytes) -> None:
        self._log.append(kind, with_readings(self._clock.readings, payload))
        self._clock.readings.clear()


class RecordedScheduler(SchedulerInterface):
    """Hands every call on, and to the recorder when it has returned."""

    def __init__(  # its context has been used already: it wraps a scheduler that stands
        self, scheduler: SchedulerInterface, recorder: DecisionRecorder
    ) -> None:
        self.scheduler = scheduler
        self._recorder = recorder
        recorder.made()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request in; one that is refused is not written."""
        try:
            self.scheduler.add_request(request)
        except DovetailError:
            self._recorder.forget()
            raise
        self._recorder.added(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests."""
        names = list(request_ids)
        aborted = self.scheduler.abort_requests(names)
        self._recorder.told(RecordKind.ABORT, *names)
        return aborted

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        plan = self.scheduler.schedule()
        self._recorder.planned(plan)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in the result of the oldest plan that is out."""
        outputs = self.scheduler.update_from_output(plan, output)
        self._recorder.settled(output)
        return outputs

    def depth(self) -> Depth:
        """Return how many requests wait and run; decides nothing, so it is not written."""
        return self.scheduler.depth()

    def pause(self, scope: PauseScope) -> None:
        """Keep requests from running."""
        self.scheduler.pause(scope)
        self._recorder.told(RecordKind.PAUSE, scope.value)

    def resume(self) -> None:
        """Lift a pause."""
        self.scheduler.resume()
        self._recorder.told(RecordKind.RESUME)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes."""
        done = self.scheduler.reset_prefix_cache()
        self._recorder.told(RecordKind.RESET_PREFIX_CACHE)
        return done

    def shutdown(self) -> None:
        """End the scheduler and the log. May be called twice."""
        self.scheduler.shutdown()
        self._recorder.close()

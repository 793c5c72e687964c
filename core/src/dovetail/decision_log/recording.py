"""A wrapper that records the calls and decisions of a scheduler.

It wraps any scheduler and its clock, so schedulers do not depend on logs. Gates and KV connectors
are rejected, because the log does not contain their results, so they cannot be replayed.
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
    """A clock that stores its readings since the last record."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.readings: list[int] = []

    def now_ns(self) -> int:
        """Return the time in nanoseconds and store it."""
        now = self._clock.now_ns()
        self.readings.append(now)
        return now


class DecisionRecorder:
    """Writes the records of one scheduler to a file."""

    def __init__(
        self, path: Path, scheduler_cls: type[SchedulerInterface], context: SchedulerContext
    ) -> None:
        """Start the log of a scheduler that will be constructed with `self.context`.

        Raises ConfigError, naming `decision_log`, if the file cannot be written or the scheduler
        cannot be recorded.
        """
        if context.gates or context.kv_connector is not None:
            raise ConfigError(
                "decision_log cannot record a scheduler with gates or a KV connector, because "
                "their results cannot be replayed; omit decision_log, or the gates and the KV "
                "connector."
            )
        try:
            self._header = LogHeader.of(scheduler_cls, context).encode()
        except TypeError as error:
            raise ConfigError(
                f"decision_log cannot store the options of the scheduler: {error}."
            ) from error
        self._clock = RecordingClock(context.clock)
        self.context = replace(context, clock=self._clock)
        self._codes = Codebooks()
        self._plans = PlanEncoder(self._codes.tokens, self._codes.contents)
        self._log = LogWriter(path)

    def made(self) -> None:
        """Write the header after the scheduler was constructed."""
        self._append(RecordKind.HEADER, self._header)

    def added(self, request: EngineCoreRequest) -> None:
        """Write a record of an added request."""
        self._append(RecordKind.ADD, encode_request(request, self._codes))

    def record_call(self, kind: RecordKind, *names: str) -> None:
        """Write a record of an engine call whose arguments are names, such as request ids."""
        self._append(kind, encode_names(names))

    def planned(self, plan: SchedulerOutput) -> None:
        """Write a record of a plan."""
        self._append(RecordKind.PLAN, self._plans.encode(plan))

    def settled(self, output: ModelRunnerOutput) -> None:
        """Write a record of a step's result."""
        self._append(RecordKind.OUTPUT, encode_output(output, self._codes.tokens))

    def forget(self) -> None:
        """Drop the clock readings of a rejected call, which is not recorded."""
        self._clock.readings.clear()

    def close(self) -> None:
        """Close the file. May be called more than once."""
        self._log.close()

    def _append(self, kind: RecordKind, payload: bytes) -> None:
        self._log.append(kind, with_readings(self._clock.readings, payload))
        self._clock.readings.clear()


class RecordedScheduler(SchedulerInterface):
    """Forwards every call to the scheduler and then to the recorder."""

    def __init__(  # takes no context, because the wrapped scheduler is already constructed
        self, scheduler: SchedulerInterface, recorder: DecisionRecorder
    ) -> None:
        self.scheduler = scheduler
        self._recorder = recorder
        recorder.made()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request. A rejected one is not recorded."""
        try:
            self.scheduler.add_request(request)
        except DovetailError:
            self._recorder.forget()
            raise
        self._recorder.added(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Abort requests."""
        names = list(request_ids)
        aborted = self.scheduler.abort_requests(names)
        self._recorder.record_call(RecordKind.ABORT, *names)
        return aborted

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        plan = self.scheduler.schedule()
        self._recorder.planned(plan)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Process the result of the oldest plan in flight."""
        outputs = self.scheduler.update_from_output(plan, output)
        self._recorder.settled(output)
        return outputs

    def depth(self) -> Depth:
        """Return the counts of requests. Not recorded, because it changes no state."""
        return self.scheduler.depth()

    def pause(self, scope: PauseScope) -> None:
        """Hold new requests, or all requests, until `resume`."""
        self.scheduler.pause(scope)
        self._recorder.record_call(RecordKind.PAUSE, scope.value)

    def resume(self) -> None:
        """Continue after a pause."""
        self.scheduler.resume()
        self._recorder.record_call(RecordKind.RESUME)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes."""
        done = self.scheduler.reset_prefix_cache()
        self._recorder.record_call(RecordKind.RESET_PREFIX_CACHE)
        return done

    def shutdown(self) -> None:
        """Shut down the scheduler and close the log. May be called more than once."""
        self.scheduler.shutdown()
        self._recorder.close()

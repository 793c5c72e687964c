"""Replays a decision log: the same scheduler receives the same inputs at the same times.

The results of the executor and all clock readings come from the log, so the scheduler must create
the same plans, byte for byte. No model runs. This module prints nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.clock import Clock
from dovetail.decision_log import (
    LoggedPlan,
    LogHeader,
    LogReader,
    Plain,
    PlanDecoder,
    PlanEncoder,
    RecordKind,
    decode_names,
    decode_output,
    decode_request,
    split_readings,
)
from dovetail.errors import DovetailError, RequestError, UserError, describe_failure
from dovetail.interfaces import (
    EngineCoreOutputs,
    PauseScope,
    Policy,
    SchedulerContext,
    SchedulerInterface,
)
from dovetail.plan import SchedulerOutput
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose_scheduler
from dovetail.request import EngineCoreRequest
from dovetail.scheduling import Scheduler

Observe = Callable[[type[Policy]], type[Policy]]
"""Given a policy class, returns a subclass that makes the same decisions and reports them."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between a replay and its log.

    step: the step whose plan differs; for a rejected request, the next step. fields: the differing
    fields, each with the value in the log and the value in the replay.
    """

    step: int
    fields: Mapping[str, tuple[object, object]]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The result of a replay.

    scheduler: the replayed scheduler as "pkg.mod:Class", with its policy if it has one.
    num_steps: the number of equal plans. covered_ns: the recorded time from the first to the last
    clock reading. took_ns: the wall time of the replay, without creating the scheduler.
    difference: the first difference; None if all plans are equal. truncated: whether the log ends
    in the middle of a record.
    """

    scheduler: str
    num_steps: int
    num_requests: int
    covered_ns: int
    took_ns: int
    difference: Difference | None
    truncated: bool


class ReplayClock:
    """A clock that returns the recorded readings one by one."""

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self.last_ns = 0
        self._readings: deque[int] = deque()

    def feed(self, readings: list[int]) -> None:
        """Set the readings of the next record. Skip unread readings of the previous record."""
        while self._readings:
            self.now_ns()
        self._readings.extend(readings)

    def now_ns(self) -> int:
        """Return the next reading; after the last reading, return the last reading again."""
        if self._readings:
            self.last_ns = self._readings.popleft()
            if self.first_ns is None:
                self.first_ns = self.last_ns
        return self.last_ns

    @property
    def covered_ns(self) -> int:
        """Time from the first to the last reading, in nanoseconds."""
        return 0 if self.first_ns is None else self.last_ns - self.first_ns


def replay_log(
    reader: LogReader, *, clock: Clock, scheduler: str = "", trust_local_code: bool = False
) -> Replay:
    """Replay a log up to its end, or to the first difference.

    clock: measures the duration of the replay. scheduler: a scheduler or policy to use instead of
    the recorded one, with default options; "" for the recorded one. trust_local_code: whether
    classes in files ("/file.py:Class") may run; the log or the caller may name them. Raises
    UserError if the log cannot be read, PluginError if the scheduler cannot be loaded.
    """
    records = iter(reader)
    first = next(records, None)
    if first is None or first.kind is not RecordKind.HEADER:
        raise UserError(
            f"{str(reader.path)!r} has no header, so it contains no steps. Record a new log."
        )
    readings, payload = split_readings(first.payload)
    registry = PluginRegistry(policy=PluginPolicy(trust_local_code=trust_local_code))
    replayed = ReplayedScheduler(LogHeader.decode(payload), readings, scheduler, registry)
    begun_ns, difference = clock.now_ns(), None
    for record in records:
        readings, payload = split_readings(record.payload)
        replayed.clock.feed(readings)
        difference = replayed.step(record.kind, payload)
        if difference is not None:
            break
    replayed.scheduler.shutdown()
    return Replay(
        scheduler=replayed.name,
        num_steps=replayed.num_steps,
        num_requests=replayed.num_requests,
        covered_ns=replayed.clock.covered_ns,
        took_ns=clock.now_ns() - begun_ns,
        difference=difference,
        truncated=reader.truncated,
    )


class ReplayedScheduler:
    """A scheduler that receives the recorded inputs of a log.

    last_request, last_plan, last_outputs: the last added request, plan and outputs; None before.
    """

    def __init__(
        self,
        header: LogHeader,
        readings: list[int],
        reference: str,
        registry: PluginRegistry,
        *,
        observe: Observe | None = None,
    ) -> None:
        """reference, observe: see `make_scheduler`. readings: clock readings of the header."""
        self.num_steps = self.num_requests = 0
        self.last_request: EngineCoreRequest | None = None
        self.last_plan: SchedulerOutput | None = None
        self.last_outputs: EngineCoreOutputs | None = None
        self.clock = ReplayClock()
        self.clock.feed(readings)
        self.scheduler, self.name = make_scheduler(header, self.clock, registry, reference, observe)
        self._out: deque[SchedulerOutput] = deque()
        self._encoder = PlanEncoder(Plain(), None)
        self._recorded, self._mine = PlanDecoder(), PlanDecoder()
        self._steps: Mapping[RecordKind, Callable[[bytes], Difference | None]] = {
            RecordKind.ADD: self._add,
            RecordKind.ABORT: self._abort,
            RecordKind.PAUSE: self._pause,
            RecordKind.RESUME: self._resume,
            RecordKind.RESET_PREFIX_CACHE: self._reset,
            RecordKind.PLAN: self._plan,
            RecordKind.OUTPUT: self._settle,
        }

    def step(self, kind: RecordKind, payload: bytes) -> Difference | None:
        """Apply one record; return the difference between log and replay, or None.

        Raises UserError if the scheduler fails.
        """
        if kind not in self._steps:
            raise UserError(f"The decision log is damaged: it has two {kind.name} records.")
        try:
            return self._steps[kind](payload)
        except DovetailError:
            raise
        except Exception as error:  # a policy may raise anything
            reason = describe_failure(error)
            raise UserError(f"{self.name} failed at step {self.num_steps}: {reason}.") from error

    def _add(self, payload: bytes) -> Difference | None:
        request = decode_request(payload)
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            sides = ("accepted", f"rejected: {error}")
            return Difference(step=self.num_steps, fields={request.request_id: sides})
        self.num_requests += 1
        self.last_request = request
        return None

    def _abort(self, payload: bytes) -> None:
        self.scheduler.abort_requests(decode_names(payload))

    def _pause(self, payload: bytes) -> None:
        self.scheduler.pause(PauseScope(decode_names(payload)[0]))

    def _resume(self, payload: bytes) -> None:
        self.scheduler.resume()

    def _reset(self, payload: bytes) -> None:
        self.scheduler.reset_prefix_cache()

    def _plan(self, payload: bytes) -> Difference | None:
        plan = self.last_plan = self.scheduler.schedule()
        encoded = self._encoder.encode(plan)
        recorded, mine = self._recorded.decode(payload), self._mine.decode(encoded)
        if encoded != payload:
            return Difference(step=recorded.step_id, fields=dict(_compare(recorded, mine)))
        self._out.append(plan)
        self.num_steps += 1
        return None

    def _settle(self, payload: bytes) -> None:
        output = decode_output(payload)
        self.last_outputs = self.scheduler.update_from_output(self._out.popleft(), output)


def checked_reference(scheduler: str | None) -> str:
    """Return the reference of a scheduler, or "" for None; raise UserError for an empty one."""
    if scheduler == "":
        raise UserError("scheduler='' names no scheduler; omit it or name a scheduler or policy.")
    return scheduler or ""


def make_scheduler(
    header: LogHeader,
    clock: Clock,
    registry: PluginRegistry,
    reference: str = "",
    observe: Observe | None = None,
) -> tuple[SchedulerInterface, str]:
    """Return the scheduler and its name.

    reference: the scheduler or policy to load; "" for the scheduler of the log. observe: returns
    the policy class to use instead of the scheduler's; only for the core's scheduler. Raises
    PluginError if it cannot be loaded.
    """
    context: SchedulerContext
    if reference:
        scheduler_cls, policy_cls = choose_scheduler(registry, reference)
        options = registry.options_of("scheduler", scheduler_cls)
        policy_options = registry.options_of("policy", policy_cls)
        header = header.with_options(options, policy_options)
        name = reference
    else:
        scheduler_cls = registry.load("scheduler", header.scheduler)
        policy_cls = registry.load("policy", header.policy) if header.policy else None
        name = f"{header.scheduler} with {header.policy}" if header.policy else header.scheduler
    if observe is not None and issubclass(scheduler_cls, Scheduler):
        policy_cls = observe(policy_cls or scheduler_cls.policy_cls)
    context = header.context(policy=policy_cls, clock=clock)
    scheduler: SchedulerInterface = construct("scheduler", scheduler_cls, context)
    return scheduler, name


def _compare(recorded: LoggedPlan, mine: LoggedPlan) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield each field that differs between two plans, with both values."""
    for name in LoggedPlan.__slots__:
        left, right = getattr(recorded, name), getattr(mine, name)
        if left != right:
            yield name, (left, right)

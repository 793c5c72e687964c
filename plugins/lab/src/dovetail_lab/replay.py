"""Replays a decision log: the same scheduler, told the same at the same times, on no machine.

What an executor answered is taken from the log, and so is every reading of the clock. So the
scheduler must plan what it planned, byte for byte. Prints nothing.
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
from dovetail.errors import RequestError, UserError
from dovetail.interfaces import PauseScope, SchedulerContext, SchedulerInterface
from dovetail.plan import SchedulerOutput
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.construction import construct
from dovetail.plugins.selection import choose_scheduler


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a replay leaves the log. step: of the plan at fault, or of the next.

    fields: what differs, each with both sides: the log's, and the replay's.
    """

    step: int
    fields: Mapping[str, tuple[object, object]]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What a replay found.

    scheduler: who planned, as "pkg.mod:Class", with its policy if it was given one. num_steps:
    that were planned alike. covered_ns: from the first to the last reading of the clock. took_ns:
    of the replay, without making the scheduler. difference: the first, None if there is none.
    truncated: the log is cut off.
    """

    scheduler: str
    num_steps: int
    num_requests: int
    covered_ns: int
    took_ns: int
    difference: Difference | None
    truncated: bool


class ReplayClock:
    """A clock that tells what was recorded, reading by reading."""

    def __init__(self) -> None:
        self.first_ns: int | None = None
        self.last_ns = 0
        self._readings: deque[int] = deque()

    def feed(self, readings: list[int]) -> None:
        """Have `readings` for the next call; what is left of those before is passed over."""
        while self._readings:
            self.now_ns()
        self._readings.extend(readings)

    def now_ns(self) -> int:
        """Return the next reading, or the last one again if there is none left."""
        if self._readings:
            self.last_ns = self._readings.popleft()
            if self.first_ns is None:
                self.first_ns = self.last_ns
        return self.last_ns

    @property
    def covered_ns(self) -> int:
        """From the first reading to the last."""
        return 0 if self.first_ns is None else self.last_ns - self.first_ns


def replay_log(
    reader: LogReader, *, clock: Clock, scheduler: str = "", trust_local_code: bool = False
) -> Replay:
    """Replay a log up to its end, or to the first difference.

    clock: to measure how long it takes. scheduler: another one than the log's, or a policy; its
    options have their defaults. trust_local_code: classes of files ("/file.py:Class") may be run,
    whether the log or the caller names them. Raises UserError if the log cannot be read,
    PluginError if its scheduler cannot be loaded.
    """
    records = iter(reader)
    first = next(records, None)
    if first is None or first.kind is not RecordKind.HEADER:
        raise UserError(f"{str(reader.path)!r} has no header: nothing was recorded.")
    readings, payload = split_readings(first.payload)
    registry = PluginRegistry(policy=PluginPolicy(trust_local_code=trust_local_code))
    replayed = _Replayed(LogHeader.decode(payload), readings, scheduler, registry)
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


class _Replayed:
    """A scheduler that is told what a log says."""

    def __init__(
        self, header: LogHeader, readings: list[int], asked: str, registry: PluginRegistry
    ) -> None:
        self.num_steps = self.num_requests = 0
        self.clock = ReplayClock()
        self.clock.feed(readings)
        self.scheduler, self.name = make_scheduler(header, self.clock, registry, asked)
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
        """Tell what one record says; return how the answer differs, if it does."""
        if kind not in self._steps:
            raise UserError(f"the log has a second record of the kind {kind.name}.")
        return self._steps[kind](payload)

    def _add(self, payload: bytes) -> Difference | None:
        request = decode_request(payload)
        try:
            self.scheduler.add_request(request)
        except RequestError as error:
            told = {request.request_id: ("taken in", f"refused: {error}")}
            return Difference(step=self.num_steps, fields=told)
        self.num_requests += 1
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
        plan = self.scheduler.schedule()
        encoded = self._encoder.encode(plan)
        recorded, mine = self._recorded.decode(payload), self._mine.decode(encoded)
        if encoded != payload:
            return Difference(step=recorded.step_id, fields=dict(_compare(recorded, mine)))
        self._out.append(plan)
        self.num_steps += 1
        return None

    def _settle(self, payload: bytes) -> None:
        self.scheduler.update_from_output(self._out.popleft(), decode_output(payload))


def make_scheduler(
    header: LogHeader, clock: Clock, registry: PluginRegistry, asked: str = ""
) -> tuple[SchedulerInterface, str]:
    """Return the scheduler of a log, or the one that is asked for instead, and what it is called.

    Raises PluginError if it cannot be loaded.
    """
    context: SchedulerContext
    if asked:
        scheduler_cls, policy_cls = choose_scheduler(registry, asked)
        options = registry.options_of("scheduler", scheduler_cls)
        policy_options = registry.options_of("policy", policy_cls)
        header = header.with_options(options, policy_options)
        name = asked
    else:
        scheduler_cls = registry.load("scheduler", header.scheduler)
        policy_cls = registry.load("policy", header.policy) if header.policy else None
        name = f"{header.scheduler} with {header.policy}" if header.policy else header.scheduler
    context = header.context(policy=policy_cls, clock=clock)
    scheduler: SchedulerInterface = construct("scheduler", scheduler_cls, context)
    return scheduler, name


def _compare(recorded: LoggedPlan, mine: LoggedPlan) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the fields in which two plans differ, with both sides."""
    for name in LoggedPlan.__slots__:
        left, right = getattr(recorded, name), getattr(mine, name)
        if left != right:
            yield name, (left, right)

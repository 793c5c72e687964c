"""Combines what a request does in successive steps to slices, which trace viewers show.

Memory: open slices of running requests, and the latest `MAX_LEFT` requests that ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from dovetail_client_tools.engine_steps.records import Step

WAITING, PREFILL, DECODE, VERIFY, PREEMPTED = "waiting", "prefill", "decode", "verify", "preempted"
KINDS = (WAITING, PREFILL, DECODE, VERIFY, PREEMPTED)
MAX_LEFT = 100_000
"""Maximum number of preempted or ended requests that are remembered, in case they continue."""
MAX_LANES = 4
"""Maximum number of steps that are in progress at the same time."""


class Slice(NamedTuple):
    """What a request did for some time. num_steps, num_tokens: 0 if it computed nothing."""

    request: int
    kind: str
    begin_ns: int
    end_ns: int
    num_steps: int = 0
    num_tokens: int = 0


class Ended(NamedTuple):
    """The end of a request. reason: "" if it is unknown."""

    request: int
    reason: str
    time_ns: int


class TraceSink(Protocol):
    """Receives a trace in the order in which its parts end."""

    def add_request(self, number: int, name: str, num_prompt: int | None) -> None:
        """Receive a request before its first slice. num_prompt: None if it is unknown."""

    def add_slice(self, item: Slice) -> None:
        """Receive a slice."""

    def add_ended(self, item: Ended) -> None:
        """Receive the end of a request.

        If the reason is unknown, the request may continue later.
        """

    def add_step(self, step: Step, lane: int) -> None:
        """Receive a step. Steps of one lane do not overlap."""


@dataclass(slots=True, eq=False)
class _Request:
    """first_step, begin_ns: start of the open decode slice. None without an open slice."""

    last_ns: int = 0
    first_step: int = 0
    begin_ns: int | None = None


@dataclass(eq=False)
class TraceBuilder:
    """Passes steps to sinks as slices. name_of: function that returns the name of a request."""

    sinks: Sequence[TraceSink]
    name_of: Callable[[int], str]
    _active: dict[int, _Request] = field(default_factory=dict)
    _left: dict[int, int] = field(default_factory=dict)
    _arrivals: dict[int, int] = field(default_factory=dict)
    _decodes: tuple[int, ...] = ()
    _num_steps: int = 0
    _end_ns: int = 0
    _lanes: list[int] = field(default_factory=lambda: [0] * MAX_LANES)

    def add_arrival(self, number: int, time_ns: int) -> None:
        """Add the arrival of a request that has no row yet."""
        self._arrivals[number] = time_ns
        while len(self._arrivals) > MAX_LEFT:
            del self._arrivals[next(iter(self._arrivals))]

    def add(self, step: Step) -> None:
        """Add the next step."""
        begin_ns, end_ns = step.begin_ns, step.begin_ns + step.duration_ns
        decodes = self._decodes if step.decodes is None else step.decodes
        for number in step.preempted:
            self._leave(number)
        for number, num_prompt, _ in step.joined:
            self._join(number, num_prompt, begin_ns)
        if decodes != self._decodes:
            self._change_decodes(decodes, begin_ns)
        self._num_steps += 1
        self._end_ns = end_ns
        for kind, runs in ((PREFILL, step.prefills), (VERIFY, step.verified)):
            for number, first, second in runs:
                num_tokens = second if kind == PREFILL else first
                self._add_run(number, kind, (begin_ns, end_ns), num_tokens)
        for number, reason in step.ended:
            self._leave(number, reason=reason)
        lane = self._lane(begin_ns, end_ns)
        for sink in self.sinks:
            sink.add_step(step, lane)

    def end(self) -> None:
        """End all open slices."""
        for number in list(self._active):
            self._close(number)

    def _join(self, number: int, num_prompt: int, begin_ns: int) -> None:
        left_ns = self._left.pop(number, None)
        arrival_ns = self._arrivals.pop(number, None)
        if number not in self._active:
            self._active[number] = _Request(last_ns=left_ns or arrival_ns or begin_ns)
            if left_ns is None:
                for sink in self.sinks:
                    sink.add_request(number, self.name_of(number), num_prompt)
        if left_ns is not None:
            self._give(Slice(number, PREEMPTED, left_ns, max(left_ns, begin_ns)))
        elif arrival_ns is not None:
            self._give(Slice(number, WAITING, arrival_ns, max(arrival_ns, begin_ns)))

    def _leave(self, number: int, reason: str | None = None) -> None:
        """End a request. Without a known reason, it can start again."""
        self._close(number)
        request = self._active.pop(number, None)
        time_ns = request.last_ns if request is not None else self._end_ns
        if not reason:
            self._left[number] = time_ns
            while len(self._left) > MAX_LEFT:
                del self._left[next(iter(self._left))]
        if reason is not None:
            for sink in self.sinks:
                sink.add_ended(Ended(number, reason, time_ns))

    def _change_decodes(self, decodes: tuple[int, ...], begin_ns: int) -> None:
        now = frozenset(decodes)
        for number in self._decodes:
            if number not in now:
                self._close(number)
        for number in decodes:
            request = self._request(number, begin_ns)
            if request.begin_ns is None:
                request.begin_ns = max(begin_ns, request.last_ns)
                request.first_step = self._num_steps
        self._decodes = decodes

    def _add_run(self, number: int, kind: str, times_ns: tuple[int, int], num_tokens: int) -> None:
        request = self._request(number, times_ns[0])
        begin_ns = max(times_ns[0], request.last_ns)
        request.last_ns = max(begin_ns, times_ns[1])
        self._give(Slice(number, kind, begin_ns, request.last_ns, 1, num_tokens))

    def _request(self, number: int, begin_ns: int) -> _Request:
        request = self._active.get(number)
        if request is None:  # it joined before the trace
            request = self._active[number] = _Request(last_ns=begin_ns)
            self._left.pop(number, None)
            for sink in self.sinks:
                sink.add_request(number, self.name_of(number), None)
        return request

    def _close(self, number: int) -> None:
        """End the open decode slice of a request."""
        request = self._active.get(number)
        if request is None or request.begin_ns is None:
            return
        num_steps = self._num_steps - request.first_step
        end_ns = max(request.begin_ns, self._end_ns)
        self._give(Slice(number, DECODE, request.begin_ns, end_ns, num_steps, num_steps))
        request.last_ns, request.begin_ns = end_ns, None

    def _give(self, item: Slice) -> None:
        for sink in self.sinks:
            sink.add_slice(item)

    def _lane(self, begin_ns: int, end_ns: int) -> int:
        """Return a lane that is free at the start of a step, or the one that is free first."""
        free = [lane for lane, until_ns in enumerate(self._lanes) if until_ns <= begin_ns]
        lane = free[0] if free else min(range(MAX_LANES), key=self._lanes.__getitem__)
        self._lanes[lane] = max(self._lanes[lane], end_ns)
        return lane

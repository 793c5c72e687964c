"""Sends the requests of one point of a load test, and records their times."""

from __future__ import annotations

import asyncio
import heapq
import math
from array import array
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from dovetail.clock import Clock
from dovetail_client_tools.http_client.client import HTTPClient
from dovetail_client_tools.http_client.connection import CallError
from dovetail_client_tools.load.load_request import NS, LoadRequest
from dovetail_client_tools.load.prompts import BodyWriter
from dovetail_client_tools.load.stream_reader import StreamReader

MS = 1_000_000
PARENT_FAILED = "previous turn failed"
NOT_SENT = "not sent in time"
MAX_KINDS = 32
"""Maximum number of kinds of errors that are counted separately."""


@dataclass(slots=True, kw_only=True)
class RequestTimes:
    """A request that was sent. All times in nanoseconds from the start of the run.

    planned_ns: when it should have been sent. first_ns, last_ns: times of the first and last text;
    -1 for none. num_output_tokens: from the server's usage, or the number of events. error: the
    kind of the error, or "".
    """

    number: int
    planned_ns: int
    sent_ns: int
    first_ns: int = -1
    last_ns: int = -1
    end_ns: int = -1
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_intended_tokens: int = 0
    error: str = ""

    @property
    def has_text(self) -> bool:
        """Whether text arrived. Otherwise `ttft_ms` and `tpot_ms` are meaningless."""
        return self.first_ns >= 0

    @property
    def ttft_ms(self) -> float:
        """Time to the first text."""
        return (self.first_ns - self.sent_ns) / MS

    @property
    def tpot_ms(self) -> float:
        """Mean time per output token after the first one."""
        return (self.last_ns - self.first_ns) / MS / max(1, self.num_output_tokens - 1)

    @property
    def e2e_ms(self) -> float:
        """Time to the end of the response."""
        return (self.end_ns - self.sent_ns) / MS


@dataclass(kw_only=True)
class LoadRecord:
    """The measurements of a run.

    gaps_ns: times between two events of a request, for all requests. errors: counts by kind.
    messages: the first message of each kind. peak: maximum number of requests in flight.
    has_usage: whether the server reported numbers of tokens.
    """

    requests: list[RequestTimes] = field(default_factory=list)
    gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    errors: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    duration_ns: int = 0
    peak: int = 0
    has_usage: bool = False

    def add_error(self, kind: str, message: str) -> str:
        """Count an error. Return the kind under which it is counted."""
        if kind not in self.errors and len(self.errors) >= MAX_KINDS:
            kind = "other"
        self.errors[kind] += 1
        self.messages.setdefault(kind, message)
        return kind


@dataclass(frozen=True, kw_only=True)
class LoadLimits:
    """Limits of a run.

    is_closed: closed loop: a request starts when another one ends, not at its time. max_in_flight:
    requests in flight; 0 for no limit. timeout_s: limit for each request. duration_s: time after
    which no request is sent; 0 for no limit.
    """

    is_closed: bool
    max_in_flight: int = 0
    timeout_s: float = 600.0
    duration_s: float = 0.0


class LoadRun:
    """One run. path: route of the server. on_done: called with (ended, failed) requests."""

    def __init__(
        self,
        client: HTTPClient,
        path: str,
        requests: list[LoadRequest],
        bodies: BodyWriter,
        limits: LoadLimits,
        *,
        clock: Clock,
        on_done: Callable[[int, int], None] = lambda ended, failed: None,
    ) -> None:
        self._client, self._path = client, path
        self._requests = requests
        self._bodies = bodies
        self._limits = limits
        self._clock = clock
        self._notify = on_done
        self._roots = deque(request for request in requests if request.parent < 0)
        self._children: dict[int, list[LoadRequest]] = {}
        for request in requests:
            if request.parent >= 0:
                self._children.setdefault(request.parent, []).append(request)
        self._due: list[tuple[int, int]] = []
        self._num_pending = len(requests)
        self._in_flight: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._start_ns = 0
        self.record = LoadRecord()

    async def run(self) -> LoadRecord:
        """Send all requests, and return the record when the last one has ended."""
        self._start_ns = self._clock.now_ns()
        try:
            await self._send_all()
            while self._in_flight:
                await asyncio.wait(self._in_flight)
        finally:
            for task in self._in_flight:
                task.cancel()
        self.record.duration_ns = self._now()
        return self.record

    def _now(self) -> int:
        return self._clock.now_ns() - self._start_ns

    async def _send_all(self) -> None:
        end_ns = round(self._limits.duration_s * NS) or math.inf
        while self._num_pending:
            self._changed.clear()
            now, planned = self._now(), self._next_ns()
            if now >= end_ns:
                for _ in range(self._num_pending):
                    self.record.add_error(NOT_SENT, "The time limit of the run was reached.")
                self._children.clear()
                return
            if planned <= now and self._has_room():
                self._start()
                if not self._limits.is_closed and len(self._in_flight) % 16 == 0:
                    await asyncio.sleep(0)  # let responses be read during a burst
                continue
            wait_ns = end_ns - now
            if self._has_room():
                wait_ns = min(wait_ns, planned - now)
            await self._wait(wait_ns / NS)

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _has_room(self) -> bool:
        limit = self._limits.max_in_flight
        return not limit or len(self._in_flight) < limit

    def _next_ns(self) -> float:
        """Return the planned time of the next request; infinity if it waits for another one."""
        root = math.inf
        if self._roots:
            root = 0 if self._limits.is_closed else self._roots[0].arrival_ns
        return min(root, self._due[0][0] if self._due else math.inf)

    def _pop_next(self) -> tuple[LoadRequest, int]:
        """Return the next request and its planned time."""
        # A conversation that can continue precedes a new one.
        if self._due and (not self._roots or self._due[0][0] <= self._now()):
            planned_ns, number = heapq.heappop(self._due)
            return self._requests[number], planned_ns
        request = self._roots.popleft()
        return request, self._now() if self._limits.is_closed else request.arrival_ns

    def _start(self) -> None:
        request, planned_ns = self._pop_next()
        self._num_pending -= 1
        task = asyncio.create_task(self._execute(request, planned_ns))
        self._in_flight.add(task)
        self.record.peak = max(self.record.peak, len(self._in_flight))
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._changed.set()

    async def _execute(self, request: LoadRequest, planned_ns: int) -> None:
        bodies, number = self._bodies, request.number
        message = self._client.request("POST", self._path, bodies.body(request))
        reader = StreamReader(
            self._now,
            request.num_output_tokens,
            self.record.gaps_ns.append,
            keeps_text=bodies.has_children(number),
        )
        times = RequestTimes(
            number=number,
            planned_ns=planned_ns,
            sent_ns=self._now(),
            num_intended_tokens=request.num_output_tokens,
        )
        try:
            await self._client.send(message, reader, timeout_s=self._limits.timeout_s)
            reader.finish()
        except CallError as error:
            times.error = self.record.add_error(error.kind, str(error))
        times.end_ns = self._now()
        self._store(times, reader)
        if times.error:
            bodies.drop(number)
            self._fail_children(number)
        else:
            bodies.add_output(number, reader.text, times.num_output_tokens)
            self._plan_children(number, times.end_ns)
        self._notify(len(self.record.requests), self.record.errors.total())

    def _store(self, times: RequestTimes, reader: StreamReader) -> None:
        if reader.num_events:
            times.first_ns, times.last_ns = reader.first_ns, reader.last_ns
        times.num_prompt_tokens = reader.num_prompt_tokens
        times.num_output_tokens = reader.num_output_tokens or reader.num_events
        self.record.has_usage |= reader.num_output_tokens > 0
        self.record.requests.append(times)

    def _plan_children(self, number: int, end_ns: int) -> None:
        for child in self._children.pop(number, ()):
            earliest = 0 if self._limits.is_closed else child.arrival_ns
            heapq.heappush(self._due, (max(earliest, end_ns + child.think_ns), child.number))

    def _fail_children(self, number: int) -> None:
        for child in self._children.pop(number, ()):
            self._num_pending -= 1
            self.record.add_error(PARENT_FAILED, "A previous turn of the conversation failed.")
            self._fail_children(child.number)

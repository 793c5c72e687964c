"""Accumulates step traces: rates, the last steps, and what each request has done."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from dovetail_client_tools.engine_steps.records import Stats, Step, Steps

NS = 1_000_000_000
MAX_STEPS = 256
"""Number of steps that are kept."""
MAX_REQUESTS = 4096
"""Number of requests that are kept. The oldest ones are dropped, first those that ended."""
RATE_NS = 5 * NS
"""Rates are means over this time."""
MIN_TRACES = 2

PREFILL, DECODE, PREEMPTED, ENDED = "prefill", "decode", "preempted", "ended"


@dataclass(slots=True, eq=False)
class RequestRow:
    """A request since the recording started.

    num_prompt, num_cached: tokens of the prompt, and those found in the prefix cache; None if the
    request started before the recording. num_computed: computed prompt tokens. num_output:
    generated tokens; a step that verifies draft tokens counts as one. first_ns, last_ns: the start
    of its first and the end of its last step. reason: why it ended, or "".
    """

    number: int
    num_prompt: int | None = None
    num_cached: int | None = None
    num_known: int = 0
    num_computed: int = 0
    num_output: int = 0
    state: str = PREFILL
    reason: str = ""
    first_ns: int = 0
    last_ns: int = 0
    output_ns: int = 0

    @property
    def output_rate(self) -> float:
        """Generated tokens per second after the first one; 0 if unknown."""
        passed_ns = self.last_ns - self.output_ns
        return (self.num_output - 1) * NS / passed_ns if self.output_ns and passed_ns > 0 else 0.0


class Rates(NamedTuple):
    """Rates per second, as means over the last `RATE_NS`."""

    new_tokens: float
    computed_tokens: float
    steps: float


class EngineView:
    """The data that a server has reported.

    stats: the latest statistics, or None. steps: the last steps, oldest first; `decodes` is never
    None.
    requests: by number, oldest first. num_restarts: how often the recording was restarted.
    """

    def __init__(self) -> None:
        self.stats: Stats | None = None
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self.requests: dict[int, RequestRow] = {}
        self.num_restarts = 0
        self.num_steps = 0
        self._started_ns: int | None = None
        self._totals: deque[Steps] = deque()
        self._active: set[int] = set()

    @property
    def after(self) -> int:
        """The number after which the next steps must be read; older ones are not shown."""
        last = self.steps[-1].number if self.steps else 0
        return max(last, self.num_steps - MAX_STEPS)

    def add(self, trace: Steps) -> None:
        """Add a response of the server. After a restart, the earlier steps are removed."""
        if trace.started_ns != self._started_ns:
            self.num_restarts += self._started_ns is not None
            self._clear(trace.started_ns)
        self.stats, self.num_steps = trace.stats, trace.num_steps
        self._totals.append(Steps(**_totals(trace)))
        while len(self._totals) > MIN_TRACES and self._totals[0].now_ns < trace.now_ns - RATE_NS:
            self._totals.popleft()
        self._add_steps(trace.steps)
        self._drop_requests()

    def _clear(self, started_ns: int) -> None:
        self._started_ns = started_ns
        self.steps.clear()
        self.requests.clear()
        self._totals.clear()
        self._active.clear()

    def rates(self) -> Rates | None:
        """Return the rates, or None if they are unknown."""
        first, last = (self._totals[0], self._totals[-1]) if self._totals else (None, None)
        if first is None or last is None or last.now_ns <= first.now_ns:
            return None
        seconds = (last.now_ns - first.now_ns) / NS
        return Rates(
            max(0, last.num_new_tokens - first.num_new_tokens) / seconds,
            max(0, last.num_computed_tokens - first.num_computed_tokens) / seconds,
            max(0, last.num_steps - first.num_steps) / seconds,
        )

    def running(self) -> list[RequestRow]:
        """Return the requests that have not ended, oldest first."""
        return [row for row in self.requests.values() if row.state != ENDED]

    # --- steps --------------------------------------------------------------------------------

    def _add_steps(self, steps: Iterable[Step]) -> None:
        """Add steps. Equal `decodes` of successive steps are counted once."""
        num_equal = 0
        decodes: tuple[int, ...] = ()
        latest: Step | None = None
        for step in steps:
            if step.decodes is not None and step.decodes != decodes:
                self._add_decodes(decodes, num_equal, latest)
                num_equal, decodes = 0, step.decodes
            num_equal += 1
            latest = step
            self.steps.append(_with_decodes(step, decodes))
            if step.joined or step.prefills or step.verified or step.preempted or step.ended:
                self._add_decodes(decodes, num_equal, step)
                num_equal = 0
                self._add_changes(step)
        self._add_decodes(decodes, num_equal, latest)

    def _add_decodes(self, decodes: Iterable[int], num_steps: int, latest: Step | None) -> None:
        """Count tokens of successive steps with the same decodes."""
        if not num_steps or latest is None:
            return
        for number in decodes:
            row = self._row(number, latest)
            row.output_ns = row.output_ns or latest.end_ns
            row.num_output += num_steps
            row.state = DECODE

    def _add_changes(self, step: Step) -> None:
        for number, num_prompt, num_known in step.joined:
            row = self._row(number, step)
            if row.num_prompt is None:
                row.num_prompt = num_prompt
            row.num_known = num_known
        for number, position, num_tokens in step.prefills:
            row = self._row(number, step)
            if row.num_cached is None and row.num_prompt is not None:
                row.num_cached = min(position, row.num_prompt)
            row.state, row.num_computed = PREFILL, position + num_tokens
            if row.num_known and position + num_tokens >= row.num_known:
                row.state, row.num_output = DECODE, row.num_output + 1
                row.output_ns = row.output_ns or step.end_ns
        for number, _, _ in step.verified:
            row = self._row(number, step)
            row.state, row.num_output = DECODE, row.num_output + 1
        for number in step.preempted:
            self._row(number, step).state = PREEMPTED
        for number, reason in step.ended:
            row = self._row(number, step)
            row.state, row.reason = ENDED, reason
            self._active.discard(number)

    def _row(self, number: int, step: Step) -> RequestRow:
        row = self.requests.get(number)
        if row is None:
            row = self.requests[number] = RequestRow(number, first_ns=step.begin_ns)
            self._active.add(number)
        row.last_ns = step.end_ns
        return row

    def _drop_requests(self) -> None:
        excess = len(self.requests) - MAX_REQUESTS
        if excess <= 0:
            return
        ended = [number for number in self.requests if number not in self._active]
        for number in [*ended, *self._active][:excess]:
            del self.requests[number]
            self._active.discard(number)


def marks(steps: Iterable[Step], numbers: Iterable[int]) -> dict[int, list[str]]:
    """Return what each request in `numbers` did in each step: one of the states, or ""."""
    shown: dict[int, list[str]] = {number: [] for number in numbers}
    members: dict[int, frozenset[int]] = {}
    for step in steps:
        decodes = step.decodes or ()
        decoding = members.get(id(decodes))
        if decoding is None:
            decoding = members[id(decodes)] = frozenset(decodes)
        special = dict(_changes(step))
        for number, states in shown.items():
            states.append(special.get(number) or (DECODE if number in decoding else ""))
    return shown


def _changes(step: Step) -> Iterator[tuple[int, str]]:
    yield from ((number, DECODE) for number, _, _ in step.verified)
    yield from ((number, PREFILL) for number, _, _ in step.prefills)
    yield from ((number, PREEMPTED) for number in step.preempted)
    yield from ((number, ENDED) for number, _ in step.ended)


def _with_decodes(step: Step, decodes: tuple[int, ...]) -> Step:
    return step if step.decodes is not None else replace(step, decodes=decodes)


def _totals(trace: Steps) -> dict[str, int]:
    names = ("started_ns", "now_ns", "after", "num_steps", "num_computed_tokens", "num_new_tokens")
    return {name: getattr(trace, name) for name in names}

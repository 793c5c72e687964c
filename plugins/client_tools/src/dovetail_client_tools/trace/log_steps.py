"""Converts the records of a decision log to steps, in the form of a running engine's steps.

A log has no reasons for ends, except aborts. The used blocks are those of requests with a row.
Memory: waiting and running requests, and the latest `MAX_LEFT` requests that ended.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from dovetail.decision_log import LoggedPlan
from dovetail.request import EngineCoreRequest
from dovetail.result import ModelRunnerOutput
from dovetail_client_tools.engine_steps.records import Step
from dovetail_client_tools.trace.slices import MAX_LEFT, TraceBuilder
from dovetail_lab.summary import LogObserver

MAX_IN_FLIGHT = 16
"""If more plans than this have no result, the oldest one is treated as complete."""
_ABORT = "abort"


@dataclass(slots=True, eq=False)
class _Row:
    """A row (batch slot) in use. num_known: tokens that were known when the request started."""

    request_id: str
    number: int
    num_known: int
    block_ids: list[int] = field(default_factory=list)


class LogSteps(LogObserver):
    """Passes the steps of a log to a builder.

    bounds: range of step ids; the second one is excluded. num_steps: steps within the bounds.
    """

    def __init__(self, bounds: tuple[int, int]) -> None:
        self.builder = TraceBuilder((), self._name)
        self.num_steps = 0
        self._bounds = bounds
        self._num_requests = 0
        self._numbers: dict[str, int] = {}
        self._left: dict[str, None] = {}
        self._arrivals: dict[str, int] = {}
        self._rows: dict[int, _Row] = {}
        self._names: dict[int, str] = {}
        self._users: Counter[int] = Counter()
        self._aborted: list[tuple[int, str]] = []
        self._in_flight: deque[Step] = deque()
        self._last_rows: Sequence[int] = ()
        self._last_decodes: tuple[int, ...] = ()

    def _name(self, number: int) -> str:
        return self._names.get(number, f"request {number}")

    # --- records ------------------------------------------------------------------------------

    def add_request(self, request: EngineCoreRequest, now_ns: int) -> None:
        """Assign a number to a request. If an id is used again, it is another request."""
        self._number(request.request_id)
        self._arrivals[request.request_id] = now_ns

    def add_abort(self, request_ids: Sequence[str], now_ns: int) -> None:
        """Store the aborts until the next plan."""
        for request_id in request_ids:
            if self._arrivals.pop(request_id, None) is not None:
                self._numbers.pop(request_id, None)
            elif (number := self._numbers.get(request_id)) is not None:
                self._aborted.append((number, _ABORT))

    def add_plan(self, plan: LoggedPlan, now_ns: int) -> None:
        """Store a step until its result arrives."""
        ended = {**dict(self._leave(row) for row in plan.leaves), **dict(self._aborted)}
        self._aborted.clear()
        joined = tuple(
            self._join(join.request_id, join.row, join.num_prompt_tokens, len(join.token_ids))
            for join in plan.joins
        )
        self._add_blocks(plan)
        prefills, verified = self._sort_runs(plan)
        self._in_flight.append(
            Step(
                number=plan.step_id,
                step_id=plan.step_id,
                begin_ns=now_ns,
                end_ns=now_ns,
                num_tokens=sum(plan.num_tokens),
                num_new_tokens=0,
                num_waiting=len(self._arrivals),
                num_running=len(self._rows),
                num_used_blocks=len(self._users),
                joined=joined,
                prefills=prefills,
                decodes=self._last_decodes,
                verified=verified,
                ended=tuple((number, reason) for number, reason in ended.items() if number),
            )
        )
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._give(self._in_flight.popleft(), now_ns, 0)

    def add_output(self, output: ModelRunnerOutput, now_ns: int) -> None:
        """End the step of a result."""
        while self._in_flight and self._in_flight[0].step_id <= output.step_id:
            self._give(self._in_flight.popleft(), now_ns, sum(output.num_sampled))

    def end(self) -> None:
        """Pass the steps without a result to the builder, and end all slices."""
        while self._in_flight:
            step = self._in_flight.popleft()
            self._give(step, step.begin_ns, 0)
        self.builder.end()

    def _give(self, step: Step, end_ns: int, num_new_tokens: int) -> None:
        first, last = self._bounds
        is_empty = not (step.num_tokens or step.joined or step.ended)
        if is_empty or not first <= step.step_id < last:
            return
        self.num_steps += 1
        self.builder.add(replace(step, end_ns=end_ns, num_new_tokens=num_new_tokens))

    # --- rows ---------------------------------------------------------------------------------

    def _number(self, request_id: str) -> int:
        self._num_requests += 1
        self._numbers[request_id] = self._num_requests
        self._left.pop(request_id, None)
        return self._num_requests

    def _join(
        self, request_id: str, row: int, num_prompt: int, num_known: int
    ) -> tuple[int, int, int]:
        number = self._numbers.get(request_id) or self._number(request_id)
        self._left.pop(request_id, None)
        arrival_ns = self._arrivals.pop(request_id, None)
        if arrival_ns is not None:
            self.builder.add_arrival(number, arrival_ns)
        self._rows[row] = _Row(request_id, number, num_known)
        self._names[number] = request_id
        return number, num_prompt, num_known

    def _leave(self, index: int) -> tuple[int, str]:
        """Free a row.

        Return the number of its request (0 if it had none), and an unknown reason.
        """
        row = self._rows.pop(index, None)
        if row is None:
            return 0, ""
        self._names.pop(row.number, None)
        for block_id in row.block_ids:
            self._users[block_id] -= 1
            if not self._users[block_id]:
                del self._users[block_id]
        self._left[row.request_id] = None
        while len(self._left) > MAX_LEFT:
            oldest = next(iter(self._left))
            del self._left[oldest]
            self._numbers.pop(oldest, None)
        return row.number, ""

    def _add_blocks(self, plan: LoggedPlan) -> None:
        for rows, counts, block_ids in plan.blocks:
            position = 0
            for index, count in zip(rows, counts, strict=True):
                row = self._rows.get(index)
                if row is not None:
                    blocks = block_ids[position : position + count]
                    row.block_ids.extend(blocks)
                    self._users.update(blocks)
                position += count

    def _sort_runs(
        self, plan: LoggedPlan
    ) -> tuple[tuple[tuple[int, int, int], ...], tuple[tuple[int, int, int], ...]]:
        """Return prefills and verified requests, and set `_last_decodes`."""
        num_runs = len(plan.rows)
        is_same = not (plan.joins or plan.leaves) and plan.rows == self._last_rows
        if is_same and sum(plan.num_tokens) == num_runs == len(self._last_decodes):
            return (), ()
        prefills, verified, decodes = [], [], []
        drafts = plan.num_drafts or [0] * num_runs
        for index, start, num_tokens, num_drafts in zip(
            plan.rows, plan.starts, plan.num_tokens, drafts, strict=True
        ):
            row = self._rows.get(index)
            if row is None:
                continue
            if num_drafts:
                verified.append((row.number, num_tokens, num_drafts))
            elif start < row.num_known:
                prefills.append((row.number, start, num_tokens))
            else:
                decodes.append(row.number)
        self._last_rows, self._last_decodes = plan.rows, tuple(decodes)
        return tuple(prefills), tuple(verified)

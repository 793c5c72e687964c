"""Records the steps of a scheduler while a reader requests them.

The recorder wraps the scheduler from the first call of `read` until no call has been made for
`EXPIRY_NS`. Without it, the engine core calls the scheduler directly, so that it costs nothing.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dovetail.clock import Clock
from dovetail.engine.step_trace.records import MAX_STEPS, StepRecord, StepTrace
from dovetail.errors import UserError
from dovetail.interfaces.scheduler import (
    Depth,
    EngineCoreOutputs,
    PauseScope,
    SchedulerInterface,
    SchedulerStats,
)
from dovetail.plan import NewRequest, SchedulerOutput
from dovetail.request import EngineCoreRequest, FinishReason
from dovetail.result import ModelRunnerOutput
from dovetail.value_checks import shorten

EXPIRY_NS = 10_000_000_000
"""The recording ends if no reader calls `read` for this long."""

MAX_ENTRIES = 1 << 18
"""Maximum number of entries (requests of a step) in all stored records."""

MAX_READ_ENTRIES = 1 << 15
"""Number of entries after which a trace contains no further step."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request that had a batch slot during the recording.

    num_known: number of tokens that were known when it got its batch slot, or None if it had a
    batch slot before the recording.
    ended: whether the end was recorded.
    """

    number: int
    num_known: int | None = None
    ended: bool = False


class StepRecorder(SchedulerInterface):
    """Forwards every call to a scheduler and records its steps."""

    def __init__(
        self,
        scheduler: SchedulerInterface,
        clock: Clock,
        restore: Callable[[SchedulerInterface], None],
    ) -> None:
        """Start the recording. restore: called once with the scheduler, when recording ends."""
        self.scheduler = scheduler
        self._clock = clock
        self._restore = restore
        self._started_ns = self._last_read_ns = clock.now_ns()
        self._steps: deque[tuple[int, StepRecord]] = deque()
        self._num_entries = self._num_steps = self._num_requests = 0
        self._num_computed_tokens = self._num_new_tokens = 0
        self._stats: SchedulerStats | None = None
        self._rows: dict[int, _Request] = {}
        self._unfinished: dict[str, _Request] = {}
        self._planned: deque[StepRecord] = deque()
        self._aborted: list[tuple[int, str]] = []
        self._last_rows = array("i")
        self._last_decodes: tuple[int, ...] = ()

    def read(self, after: int, max_steps: int, stats: SchedulerStats | None) -> StepTrace:
        """Return the stored records with numbers above `after`, at most `max_steps`.

        stats: the statistics to return if no step was recorded yet. Raises UserError for a
        negative `after`, or `max_steps` outside of 1 to MAX_STEPS.
        """
        if type(after) is not int or after < 0:
            raise UserError(f"after={shorten(after)} must be an integer of at least 0.")
        if type(max_steps) is not int or not 1 <= max_steps <= MAX_STEPS:
            raise UserError(f"max_steps={shorten(max_steps)} must be between 1 and {MAX_STEPS}.")
        self._last_read_ns = self._clock.now_ns()
        first = self._num_steps - len(self._steps)
        after = max(after, first) if after <= self._num_steps else first
        return StepTrace(
            started_ns=self._started_ns,
            now_ns=self._last_read_ns,
            after=after,
            num_steps=self._num_steps,
            num_computed_tokens=self._num_computed_tokens,
            num_new_tokens=self._num_new_tokens,
            stats=self._stats or stats,
            steps=self._select(after - first, max_steps),
        )

    def _select(self, start: int, max_steps: int) -> tuple[StepRecord, ...]:
        """Return stored records from index `start`. Repeated `decodes` are omitted."""
        selected: list[StepRecord] = []
        decodes: tuple[int, ...] | None = None
        num_entries = 0
        for index in range(start, min(len(self._steps), start + max_steps)):
            size, record = self._steps[index]
            num_entries += size
            if decodes is not None and record.decodes is decodes:
                num_entries -= len(decodes)
                record = replace(record, decodes=None)
            else:
                decodes = record.decodes
            selected.append(record)
            if num_entries >= MAX_READ_ENTRIES:
                break
        return tuple(selected)

    # --- calls of the scheduler ---------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan the next step."""
        begin_ns = self._clock.now_ns()
        if begin_ns - self._last_read_ns > EXPIRY_NS:
            self._restore(self.scheduler)
            return self.scheduler.schedule()
        plan = self.scheduler.schedule()
        self._planned.append(self._record_plan(plan, begin_ns))
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Process the result of the oldest plan in flight."""
        outputs = self.scheduler.update_from_output(plan, output)
        if self._planned and self._planned[0].step_id == plan.step_id:
            self._record_end(self._planned.popleft(), outputs)
        return outputs

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request."""
        self.scheduler.add_request(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Abort requests."""
        aborted = self.scheduler.abort_requests(request_ids)
        for request_id in aborted:
            if (request := self._unfinished.pop(request_id, None)) is not None:
                request.ended = True
                self._aborted.append((request.number, FinishReason.ABORT.value))
        return aborted

    def depth(self) -> Depth:
        """Return the counts of waiting and running requests."""
        return self.scheduler.depth()

    def pause(self, scope: PauseScope) -> None:
        """Hold new requests, or all requests, until `resume`."""
        self.scheduler.pause(scope)

    def resume(self) -> None:
        """Continue after a pause."""
        self.scheduler.resume()

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes."""
        return self.scheduler.reset_prefix_cache()

    def shutdown(self) -> None:
        """Shut the scheduler down."""
        self.scheduler.shutdown()

    # --- records ------------------------------------------------------------------------------

    def _record_plan(self, plan: SchedulerOutput, begin_ns: int) -> StepRecord:
        preempted, left = self._leave(plan.leaves)
        ended = (*self._aborted, *left)
        self._aborted.clear()
        joined = tuple(self._join(item) for item in plan.joins)
        prefills: list[tuple[int, int, int]] = []
        verified: list[tuple[int, int, int]] = []
        num_runs = len(plan.rows)
        is_same = not (plan.joins or plan.leaves) and plan.rows == self._last_rows
        if not is_same or plan.total_num_tokens != num_runs or len(self._last_decodes) != num_runs:
            decodes: list[int] = []
            self._sort_runs(plan, prefills, verified, decodes)
            if (new := tuple(decodes)) != self._last_decodes:
                self._last_decodes = new
            self._last_rows = plan.rows
        return StepRecord(
            number=0,
            step_id=plan.step_id,
            begin_ns=begin_ns,
            planned_ns=self._clock.now_ns(),
            end_ns=0,
            num_tokens=plan.total_num_tokens,
            num_new_tokens=0,
            joined=joined,
            prefills=tuple(prefills),
            decodes=self._last_decodes,
            verified=tuple(verified),
            preempted=tuple(preempted),
            ended=ended,
        )

    def _leave(self, rows: Iterable[int]) -> tuple[list[int], list[tuple[int, str]]]:
        """Release batch slots. Return the preempted requests, and those that ended unobserved."""
        preempted: list[int] = []
        left: list[tuple[int, str]] = []
        for row in rows:
            request = self._rows.pop(row, None)
            if request is None or request.ended:
                continue
            if request.num_known is None:
                left.append((request.number, ""))
            else:
                preempted.append(request.number)
        return preempted, left

    def _join(self, new: NewRequest) -> tuple[int, int, int]:
        request = self._unfinished.get(new.request_id)
        if request is None:
            request = self._unfinished[new.request_id] = self._number()
        request.num_known = len(new.token_ids)
        self._rows[new.row] = request
        return request.number, new.num_prompt_tokens, request.num_known

    def _number(self) -> _Request:
        self._num_requests += 1
        return _Request(self._num_requests)

    def _sort_runs(
        self,
        plan: SchedulerOutput,
        prefills: list[tuple[int, int, int]],
        verified: list[tuple[int, int, int]],
        decodes: list[int],
    ) -> None:
        """Append the scheduled tokens of each request to one of the lists."""
        rows = self._rows
        all_drafts = plan.num_drafts or bytes(len(plan.rows))
        runs = zip(plan.rows, plan.starts, plan.num_tokens, all_drafts, strict=True)
        for row, start, num_tokens, num_drafts in runs:
            request = rows.get(row)
            if request is None:
                request = rows[row] = self._number()
            known = request.num_known
            if num_drafts:
                verified.append((request.number, num_tokens, num_drafts))
            elif start < known if known is not None else num_tokens > 1:
                prefills.append((request.number, start, num_tokens))
            else:
                decodes.append(request.number)

    def _record_end(self, record: StepRecord, outputs: EngineCoreOutputs) -> None:
        ended = list(record.ended)
        for ending in outputs.finished:
            if (request := self._unfinished.pop(ending.request_id, None)) is not None:
                request.ended = True
                ended.append((request.number, ending.reason.value))
        stats = self._stats = outputs.stats or self._stats
        num_new_tokens = len(outputs.token_ids)
        if not (record.num_tokens or record.joined or record.preempted or ended):
            return  # nothing happened in this step
        self._num_computed_tokens += record.num_tokens
        self._num_new_tokens += num_new_tokens
        self._num_steps += 1
        record = replace(
            record,
            number=self._num_steps,
            end_ns=self._clock.now_ns(),
            num_new_tokens=num_new_tokens,
            num_waiting=stats.num_waiting if stats else 0,
            num_running=stats.num_running if stats else 0,
            num_used_blocks=stats.num_used_blocks if stats else 0,
            num_preemptions=stats.num_preemptions if stats else 0,
            ended=tuple(ended),
        )
        self._store(record)

    def _store(self, record: StepRecord) -> None:
        """Store a record, and drop the oldest ones above the limits."""
        columns = (record.joined, record.prefills, record.decodes or (), record.verified)
        size = 1 + sum(map(len, columns)) + len(record.preempted) + len(record.ended)
        self._steps.append((size, record))
        self._num_entries += size
        while len(self._steps) > MAX_STEPS or self._num_entries > MAX_ENTRIES:
            self._num_entries -= self._steps.popleft()[0]

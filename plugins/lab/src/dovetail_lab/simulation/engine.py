"""A simulated engine: the engine core with a virtual clock, and the requests that arrive at it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.errors import DovetailError, EngineDeadError, RequestError
from dovetail.interfaces import SchedulerInterface
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail.scheduling.decode_stretch import DecodeStretch
from dovetail_lab.simulation.arrival_queue import ArrivalQueue
from dovetail_lab.simulation.executor import SimExecutor, StepObserver
from dovetail_lab.simulation.prompts import OUTPUT_TOKEN, STOP_TOKEN, VOCAB_SIZE, Prompts
from dovetail_lab.simulation.request_table import RequestTable
from dovetail_lab.simulation.results import RunResult, StepColumns
from dovetail_lab.simulation.schedulers import make_scheduler
from dovetail_lab.simulation.setup import EngineSetup, StepTimeModel, Times
from dovetail_lab.workloads.workload import WorkloadRequest

MAX_IDLE_STEPS = 10_000
"""A run fails after this many consecutive steps without tokens while requests are waiting."""

MIN_STRETCH = 2
"""The minimum number of decode steps that are computed at once."""

_STOPS = frozenset({STOP_TOKEN})


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """Limits of one run. If a run exceeds a limit, it ends with `RunResult.error`.

    time_s: wall time in seconds, checked between steps. num_steps: engine steps; 0 for no limit.
    """

    time_s: float = 3600.0
    num_steps: int = 0

    def excess(self, num_steps: int, time_s: float) -> str:
        """Return the error if these steps or seconds exceed a limit, otherwise ""."""
        if self.num_steps and num_steps >= self.num_steps:
            return f"the run has reached its limit of {self.num_steps} steps"
        if time_s > self.time_s:
            return f"the run has exceeded its time limit of {self.time_s:g} s"
        return ""


class SimulatedEngine(StepObserver):
    """One engine with a virtual clock, and the requests that will arrive at it.

    clock, table, core: the virtual clock, the times of the requests, the engine core. steps: the
    columns to fill, or None. macro_steps: whether stretches of decode steps are computed at once.
    """

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        setup: EngineSetup,
        step_times: StepTimeModel,
        *,
        decision_log: Path | None = None,
        clock: ManualClock | None = None,
        arrivals: ArrivalQueue | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        """Create an engine for a workload.

        clock: None for a clock that starts at 0. arrivals: None for the workload's arrivals.
        prompts: None to create the prompts.
        """
        self._requests = requests
        self._setup = setup
        self._step_times = step_times
        self.clock = clock or ManualClock()
        self.table = RequestTable(self._requests, max_num_seqs=setup.limits.max_num_seqs)
        self.steps: StepColumns | None = None
        self.macro_steps = True
        self._prompts = prompts or Prompts(self._requests)
        self._arrivals = arrivals or ArrivalQueue(self._requests)
        self._executor = self._make_executor()
        self._scheduler = self._make_scheduler(decision_log)
        self._num_idle = 0
        self._gap_ns = 0
        self._num_calls = 0
        self._core_ns = 0
        self.core = EngineCore(
            self._executor,
            self._scheduler,
            vocab_size=VOCAB_SIZE,
            max_model_len=setup.limits.max_model_len,
            clock=self.clock,
        )
        self._step = self.core.step if setup.depth == 1 else self.core.step_with_batch_queue

    def _make_executor(self) -> SimExecutor:
        """Return the executor of the engine core."""
        return SimExecutor(
            self.table, self._step_times, self.clock, depth=self._setup.depth, observer=self
        )

    def _make_scheduler(self, decision_log: Path | None) -> SchedulerInterface:
        """Return the scheduler of the engine core."""
        return make_scheduler(self._setup, self.clock, decision_log)

    def run(self, limits: RunLimits) -> RunResult:
        """Run until all requests have ended, or a limit is exceeded."""
        begun_s = time.perf_counter()
        error = ""
        try:
            while self.advance() and not error:
                error = limits.excess(self.num_steps, time.perf_counter() - begun_s)
        except DovetailError as failure:
            error = str(failure)
        host_ns = int((time.perf_counter() - begun_s) * 1e9)
        result = self.result(error, host_ns)
        self.shutdown()
        return result

    @property
    def has_work(self) -> bool:
        """Whether the engine core has unfinished requests or steps in flight."""
        return self.core.has_work()

    @property
    def num_steps(self) -> int:
        """Number of executed steps."""
        return self._executor.num_steps

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for a batch slot."""
        return self._scheduler.depth().num_waiting

    @property
    def num_running(self) -> int:
        """Number of requests that have a batch slot."""
        return self._scheduler.depth().num_running

    def shutdown(self) -> None:
        """Shut the scheduler down. If it has failed before, an error of the shutdown is ignored."""
        with suppress(Exception):
            self._scheduler.shutdown()

    def advance(self) -> bool:
        """Add the requests that have arrived, and run a step or wait. Return False at the end."""
        for number in self._arrivals.take(self.clock.now_ns()):
            self._add(number)
        if self.core.has_work():
            if not (self.macro_steps and self._skip_decoding()):
                self._run_step()
            return True
        next_ns = self._arrivals.next_ns
        if next_ns is None:
            return False
        self.clock.advance(next_ns - self.clock.now_ns())
        return True

    def result(self, error: str = "", host_ns: int = 0) -> RunResult:
        """Return the result so far."""
        stats, limits = self.core.get_stats(), self._setup.limits
        return RunResult(
            requests=self.table.columns(),
            steps=self.steps,
            num_steps=self._executor.num_steps,
            num_request_steps=self._executor.num_runs,
            end_ns=self.clock.now_ns(),
            host_ns=host_ns,
            scheduler_ns=(self._core_ns - self._executor.host_ns) // max(1, self._num_calls),
            num_blocks=self._setup.num_blocks,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            prefix_queries=stats.prefix_queries if stats else 0,
            prefix_hits=stats.prefix_hits if stats else 0,
            num_preemptions=stats.num_preemptions if stats else 0,
            num_recomputed_tokens=stats.num_recomputed_tokens if stats else 0,
            num_idle_steps=stats.num_idle_steps if stats else 0,
            error=error,
        )

    def on_step(self, plan: SchedulerOutput, start_ns: int, end_ns: int) -> None:
        """Record an executed step. Its counts are added when the scheduler has its result."""
        if self._setup.depth == 1 and plan.rows:
            num_prefill_tokens = plan.total_num_tokens - plan.num_tokens.count(1)
            self._gap_ns = self._step_times.gap_ns(len(plan.rows), num_prefill_tokens)
        if self.steps is not None and plan.rows:
            num_decodes = self.table.num_decode_runs(plan)
            self._record(start_ns, end_ns - start_ns, 1, plan.total_num_tokens, num_decodes)

    # --- requests -------------------------------------------------------------------------------

    def _add(self, number: int) -> None:
        """Add a request that has arrived to the engine core."""
        request = self._requests[number]
        arrival_ns = self._arrivals.time_of(number)
        self.table.arrival_ns[number] = arrival_ns
        deadline_ns = arrival_ns + request.ttft_slo_ns if request.ttft_slo_ns else 0
        try:
            self.core.add_request(
                EngineCoreRequest(
                    request_id=request.request_id,
                    prompt_token_ids=self._prompts.make(request),
                    sampling_params=_sampling_params(request.max_tokens, request.expected_tokens),
                    max_tokens=request.max_tokens,
                    stop_token_ids=_STOPS,
                    priority=request.priority,
                    tenant=request.tenant,
                    arrival_ns=arrival_ns,
                    deadline_ns=deadline_ns,
                )
            )
        except RequestError:
            self.table.finish(request.request_id, self.clock.now_ns(), failed=True)
            self._arrivals.reject(number)

    # --- steps ----------------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Run one call of the engine core."""
        num_steps = self._executor.num_steps
        begun_ns = time.perf_counter_ns()
        outputs = self._step()
        self._core_ns += time.perf_counter_ns() - begun_ns
        self._num_calls += 1
        if outputs is None:
            return
        now_ns = self.clock.now_ns()
        self.clock.advance(self._gap_ns)
        self._gap_ns = 0
        for number in self.table.record(outputs, now_ns):
            self._arrivals.end(number, now_ns)
        if self.steps is not None and outputs.stats is not None and self.steps.num_running:
            self.steps.num_running[-1] = outputs.stats.num_running
            self.steps.num_waiting[-1] = outputs.stats.num_waiting
            self.steps.num_used_blocks[-1] = outputs.stats.num_used_blocks
        ran_nothing = outputs.stats is not None and not outputs.stats.num_scheduled_tokens
        self._wait_idle(ran_nothing and self._executor.num_steps > num_steps)

    def _wait_idle(self, is_idle: bool) -> None:
        """After a step without tokens, wait for the engine's next attempt or the next arrival."""
        self._num_idle = self._num_idle + 1 if is_idle else 0
        if self._num_idle > MAX_IDLE_STEPS:
            depth = self._scheduler.depth()
            raise EngineDeadError(
                f"the scheduler scheduled no request in {MAX_IDLE_STEPS} consecutive steps, "
                "although "
                f"{depth.num_active} requests are unfinished"
            )
        wait_ns = int(self.core.wait_s * 1e9)
        if wait_ns:
            next_ns = self._arrivals.next_ns
            if next_ns is not None:
                wait_ns = min(wait_ns, max(0, next_ns - self.clock.now_ns()))
            self.clock.advance(wait_ns)

    def _skip_decoding(self) -> bool:
        """Compute the next steps at once if they are pure decode steps."""
        scheduler = self._scheduler
        if self._setup.depth > 1 or not isinstance(scheduler, Scheduler):
            return False
        stretch = scheduler.decode_stretch()
        if stretch is None:
            return False
        num_steps = min(stretch.max_steps, self.table.num_steps_to_stop(stretch))
        if num_steps < MIN_STRETCH:
            return False
        num_rows = len(stretch.rows)
        gap_ns = self._step_times.gap_ns(num_rows)
        ends = self._ends_of_steps(stretch, num_steps + 1, gap_ns)
        num_taken = stretch.run(min(len(ends), num_steps), OUTPUT_TOKEN)
        if not num_taken:
            return False
        self._end_stretch(stretch, ends[:num_taken])
        self.clock.advance(gap_ns)
        if num_taken < len(ends) and num_taken == num_steps:
            self._run_last(stretch, int(ends[num_steps]), gap_ns)
        return True

    def _ends_of_steps(self, stretch: DecodeStretch, num_steps: int, gap_ns: int) -> Times:
        """Return the end times of at most `num_steps` steps that start before the next arrival."""
        times = self._step_times.decode_times_ns(len(stretch.rows), sum(stretch.starts), num_steps)
        ends = (times + gap_ns if gap_ns else times).cumsum()
        change_ns = self._executor.batch_change_ns(stretch.rows)
        ends += self.clock.now_ns() - gap_ns + change_ns
        next_ns = self._arrivals.next_ns
        if next_ns is not None and int(ends[-1]) + gap_ns >= next_ns:
            ends = ends[: 1 + int(np.searchsorted(ends, next_ns - gap_ns))]
        return ends

    def _run_last(self, stretch: DecodeStretch, end_ns: int, gap_ns: int) -> None:
        """Run the step in which requests of a stretch end, unless there are not enough blocks."""
        tokens = self.table.last_tokens(stretch.rows)
        try:
            ended = stretch.run_last(tokens, end_ns)
        except DovetailError:
            raise
        except Exception as error:
            raise self.core.scheduler_failed("a step's result was processed", error) from error
        if ended is None:
            return
        self._end_stretch(stretch, np.array([end_ns]))
        for request in ended:
            number = self.table.finish(request.request_id, end_ns)
            self._arrivals.end(number, end_ns)
        self.clock.advance(gap_ns)

    def _end_stretch(self, stretch: DecodeStretch, ends: Times) -> None:
        """Record the steps of a stretch, and advance the clock to the end of the stretch."""
        now_ns, end_ns, num_rows = self.clock.now_ns(), int(ends[-1]), len(stretch.rows)
        self.table.skip(stretch.rows, ends)
        self.clock.advance(end_ns - now_ns)
        self._executor.skip(len(ends), stretch.rows)
        if self.steps is not None:
            num_tokens = len(ends) * num_rows
            self._record(now_ns, end_ns - now_ns, len(ends), num_tokens, num_tokens)
            depth = self._scheduler.depth()
            self.steps.num_running[-1] = depth.num_running
            self.steps.num_waiting[-1] = depth.num_waiting
            self.steps.num_used_blocks[-1] = stretch.num_used_blocks

    def _record(
        self, start_ns: int, duration_ns: int, num_steps: int, num_tokens: int, num_decodes: int
    ) -> None:
        assert self.steps is not None
        self.steps.start_ns.append(start_ns)
        self.steps.duration_ns.append(duration_ns)
        self.steps.num_steps.append(num_steps)
        self.steps.num_prefill_tokens.append(num_tokens - num_decodes)
        self.steps.num_decode_tokens.append(num_decodes)
        self.steps.num_running.append(0)
        self.steps.num_waiting.append(0)
        self.steps.num_used_blocks.append(0)


@lru_cache(maxsize=1024)
def _sampling_params(max_tokens: int, expected_tokens: int | None) -> SamplingParams:
    """Return the parameters that a client sends, with its estimate of the output length."""
    estimate = {"expected_tokens": expected_tokens} if expected_tokens else {}
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, extra_args=estimate)

"""An executor that computes the duration of each step instead of running a model."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from dovetail.clock import ManualClock
from dovetail.errors import ContractError
from dovetail.interfaces import Executor, Handle
from dovetail.interfaces.executor import Ready
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_lab.simulation.previous_step import After, PreviousStep
from dovetail_lab.simulation.request_table import RequestTable
from dovetail_lab.simulation.setup import StepTimeModel


class StepObserver:
    """Receives each executed step. The default does nothing."""

    def on_step(self, plan: SchedulerOutput, start_ns: int, end_ns: int) -> None:
        """Handle a step. Called after its outputs are in the request table."""


class Transfers(Protocol):
    """The worker side of a KV connector in virtual time."""

    def begin(self, instructions: bytes, now_ns: int) -> None:
        """Begin the transfers of a plan."""

    def take_ended(self, now_ns: int) -> bytes:
        """Return the message with the transfers that have ended."""


class SimExecutor(Executor):
    """Executes plans in virtual time: the device runs one step after another.

    A result is available when its step has ended; waiting for it advances the clock. With a depth
    above 1, a step starts when the device has finished the step before, so the host's work overlaps
    with the device's work as in the engine.
    num_steps, num_runs: number of executed steps, and of scheduled requests in them. host_ns: wall
    time for computing the results. transfers: the KV connector's worker side, or None.
    """

    max_concurrent_steps = 1

    def __init__(  # takes no ExecutorContext, because only the simulator constructs it
        self,
        table: RequestTable,
        step_times: StepTimeModel,
        clock: ManualClock,
        *,
        depth: int,
        observer: StepObserver,
    ) -> None:
        self.max_concurrent_steps = depth
        self.num_steps = 0
        self.num_runs = 0
        self.host_ns = 0
        self._table = table
        self._step_times = step_times
        self._clock = clock
        self._observer = observer
        self._free_ns = 0
        self._change_ns = [step_times.batch_change_ns(after) for after in After]
        self._previous = PreviousStep()
        self.transfers: Transfers | None = None
        self._plan: SchedulerOutput | None = None

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Store the plan for `sample_tokens`."""
        self._plan = plan
        return Ready(None)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Return a handle to the step, which ends after all earlier steps."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise ContractError("sample_tokens was called without execute_model.")
        planned_ns = self._clock.now_ns()
        start_ns = max(planned_ns, self._free_ns)
        self._free_ns = self._end_ns(plan, start_ns)
        if self.transfers is not None and plan.kv_transfer:
            self.transfers.begin(plan.kv_transfer, start_ns)
        self.num_steps += 1
        self.num_runs += len(plan.rows)
        return _Step(self, plan, planned_ns, start_ns, self._free_ns)

    def _end_ns(self, plan: SchedulerOutput, start_ns: int) -> int:
        """Return the end of a step that the device starts at `start_ns`."""
        if not plan.rows:
            return start_ns
        time_ns = max(1, self._step_times.step_ns(plan))
        return start_ns + time_ns + self._change_ns[self._previous.run(plan)]

    def batch_change_ns(self, rows: array[int]) -> int:
        """Return the additional time of the next step if these batch slots decode one token."""
        return self._change_ns[self._previous.before_decodes(rows.tobytes())]

    def end(
        self, plan: SchedulerOutput, planned_ns: int, start_ns: int, end_ns: int
    ) -> ModelRunnerOutput:
        """Advance the clock to the end of a step. Return its result."""
        begun_ns = time.perf_counter_ns()
        self._clock.advance(max(0, end_ns - self._clock.now_ns()))
        tokens = self._table.sample(plan, planned_ns, end_ns)
        self._observer.on_step(plan, start_ns, end_ns)
        ended = self.transfers.take_ended(end_ns) if self.transfers is not None else b""
        self.host_ns += time.perf_counter_ns() - begun_ns
        return ModelRunnerOutput(
            step_id=plan.step_id,
            num_sampled=array("B", plan.samples),
            token_ids=tokens,
            kv_transfer=ended,
        )

    def skip(self, num_steps: int, rows: array[int]) -> None:
        """Count skipped decode steps of these batch slots. The clock must be at their end."""
        self.num_steps += num_steps
        self.num_runs += num_steps * len(rows)
        self._previous.run_decodes(rows.tobytes())
        self._free_ns = self._clock.now_ns()

    def collective_rpc(
        self,
        operation: str | Callable[..., Any],
        *,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        non_block: bool = False,
    ) -> Any:
        """Raise ContractError: there are no workers."""
        raise ContractError(f"The simulator has no workers, so {operation!r} cannot be called.")

    def check_health(self) -> None:
        """Do nothing, because nothing can fail."""

    def shutdown(self) -> None:
        """Do nothing, because there are no processes."""


class _Step:
    """The handle to a step. Waiting for the result advances the virtual clock."""

    __slots__ = ("_arguments", "_executor", "_result")

    def __init__(self, executor: SimExecutor, *arguments: Any) -> None:
        self._executor = executor
        self._arguments = arguments
        self._result: ModelRunnerOutput | None = None

    def done(self) -> bool:
        """Return True: `result` never blocks."""
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Return the result, and advance the clock to the end of the step."""
        if self._result is None:
            self._result = self._executor.end(*self._arguments)
        return self._result

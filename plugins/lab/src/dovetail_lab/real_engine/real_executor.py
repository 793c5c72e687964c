"""An executor that runs the real model, but returns tokens of the workload.

The model computes every step, but its tokens are replaced, so that each request has the output
length of the workload and policies cannot see this length before the request ends.
"""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np

from dovetail.errors import ContractError
from dovetail.interfaces import Executor, Handle
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import NewRequest, SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_lab.real_engine.latched_clock import LatchedClock
from dovetail_lab.simulation.executor import SimExecutor, StepObserver
from dovetail_lab.simulation.previous_step import After
from dovetail_lab.simulation.request_table import RequestTable
from dovetail_lab.simulation.setup import Times


class ModelPlans:
    """Converts plans of the lab for a worker, with token ids from the model's vocabulary.

    The generations of batch slots increase over all runs of an engine, as workers require.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._first_generation = 0
        self._last_generation = 0

    def begin_run(self) -> None:
        """Begin a run with a new scheduler."""
        self._first_generation = self._last_generation

    def convert(self, plan: SchedulerOutput) -> SchedulerOutput:
        """Return the plan for the worker."""
        if not plan.joins:
            return plan
        return replace(plan, joins=tuple(self._convert_join(new) for new in plan.joins))

    def _convert_join(self, new: NewRequest) -> NewRequest:
        tokens = np.frombuffer(new.token_ids, dtype=np.int32) % self._vocab_size
        generation = self._first_generation + new.generation
        self._last_generation = max(self._last_generation, generation)
        return replace(
            new,
            generation=generation,
            token_ids=array("i", tokens.astype(np.int32).tobytes()),
            stop_token_ids=frozenset(),
        )


class RealExecutor(SimExecutor):
    """Runs each step on the executor of a real engine, and samples the tokens of the workload."""

    _clock: LatchedClock

    def __init__(  # takes no ExecutorContext, because only a run constructs it
        self,
        executor: Executor,
        plans: ModelPlans,
        table: RequestTable,
        clock: LatchedClock,
        *,
        observer: StepObserver,
    ) -> None:
        super().__init__(
            table, NoTimes(), clock, depth=executor.max_concurrent_steps, observer=observer
        )
        self._real = executor
        self._plans = plans

    def execute_model(self, plan: SchedulerOutput) -> Handle[None]:
        """Run the model for `plan`."""
        super().execute_model(plan)
        return self._real.execute_model(self._plans.convert(plan))

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> Handle[ModelRunnerOutput]:
        """Sample for the plan of the last `execute_model` call."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise ContractError("sample_tokens was called without execute_model.")
        planned_ns = self._clock.now_ns()
        self.num_steps += 1
        self.num_runs += len(plan.rows)
        return _RealStep(self, self._real.sample_tokens(grammar), plan, planned_ns)

    def end_real(self, plan: SchedulerOutput, planned_ns: int) -> ModelRunnerOutput:
        """Read the clock at the end of a step. Return the step's result."""
        start_ns = max(planned_ns, self._free_ns)
        self._free_ns = self._clock.latch()
        return self.end(plan, planned_ns, start_ns, self._free_ns)

    def check_health(self) -> None:
        """Raise EngineDeadError if a worker has failed."""
        self._real.check_health()


class _RealStep:
    """The handle to a step in flight."""

    __slots__ = ("_executor", "_handle", "_plan", "_planned_ns", "_result")

    def __init__(
        self,
        executor: RealExecutor,
        handle: Handle[ModelRunnerOutput],
        plan: SchedulerOutput,
        planned_ns: int,
    ) -> None:
        self._executor = executor
        self._handle = handle
        self._plan = plan
        self._planned_ns = planned_ns
        self._result: ModelRunnerOutput | None = None

    def done(self) -> bool:
        """Return whether `result` would return without waiting."""
        return self._handle.done()

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the model. Return the step's result with the tokens of the workload."""
        if self._result is None:
            self._handle.result(timeout)
            self._result = self._executor.end_real(self._plan, self._planned_ns)
        return self._result


class NoTimes:
    """The step-time model of an executor that measures times."""

    name = "real"

    def step_ns(self, plan: SchedulerOutput) -> int:
        """Raise AssertionError: the times are measured."""
        raise AssertionError("a step of a real engine has no modeled duration")

    def decode_times_ns(self, num_requests: int, num_kv_tokens: int, num_steps: int) -> Times:
        """Raise AssertionError: the times are measured."""
        raise AssertionError("a step of a real engine has no modeled duration")

    def batch_change_ns(self, after: After) -> int:
        """Return 0: the measured times include it."""
        return 0

    def gap_ns(self, num_runs: int, num_prefill_tokens: int = 0) -> int:
        """Return 0, because the pause between real steps passes in real time."""
        return 0

"""The times of a recorded run, and a simulation that repeats the run with these times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dovetail.decision_log import LogReader, RecordKind, split_readings
from dovetail.errors import UserError
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_lab.real_engine.real_executor import NoTimes
from dovetail_lab.simulation.engine import RunLimits, SimulatedEngine
from dovetail_lab.simulation.executor import SimExecutor
from dovetail_lab.simulation.results import RunResult, StepColumns
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.workloads.workload import Workload, WorkloadRequest


@dataclass(frozen=True, kw_only=True)
class RecordedTimes:
    """When a run planned its steps and received their results, in nanoseconds of its clock.

    ends_ns: when the result of each step was processed. resumes_ns: the time of the run loop's
    first action (a request or a plan) after a number of plans and a number of results.
    """

    ends_ns: array[int]
    resumes_ns: dict[tuple[int, int], int]

    @classmethod
    def read(cls, log: Path) -> Self:
        """Read the times of a decision log. Raises UserError if the file is not a readable log."""
        ends, resumes, num_plans = array("q"), dict[tuple[int, int], int](), 0
        for record in LogReader(log):
            readings, _ = split_readings(record.payload)
            if record.kind in (RecordKind.ADD, RecordKind.PLAN):
                resumes.setdefault((num_plans, len(ends)), _first(readings, log))
                num_plans += record.kind is RecordKind.PLAN
            elif record.kind is RecordKind.OUTPUT:
                ends.append(_first(readings, log))
        return cls(ends_ns=ends, resumes_ns=resumes)


def repeat_run(
    workload: Workload,
    setup: EngineSetup,
    log: Path,
    *,
    decision_log: Path | None = None,
    limits: RunLimits | None = None,
) -> RunResult:
    """Simulate a workload with the step times and pauses of a recorded run.

    log: the decision log of a run of `run_real` or `simulate` with the same workload and setup.
    decision_log: a new file for the log of this simulation; it equals `log` byte for byte, unless
    the simulator and the engine differ. Raises UserError if `log` cannot be read. If the simulation
    takes more steps than the recorded run, the result has an error.
    """
    run = _RepeatedRun(workload.requests, setup, RecordedTimes.read(log), decision_log)
    run.steps = StepColumns()
    return run.run(limits or RunLimits())


class _RepeatedRun(SimulatedEngine):
    """A simulated engine with the times of a recorded run."""

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        setup: EngineSetup,
        times: RecordedTimes,
        decision_log: Path | None,
    ) -> None:
        self._times = times
        super().__init__(requests, setup, NoTimes(), decision_log=decision_log)
        self.macro_steps = False

    def _make_executor(self) -> SimExecutor:
        self._recorded = _RecordedExecutor(
            self.table, NoTimes(), self.clock, depth=self._setup.depth, observer=self
        )
        self._recorded.ends_ns = self._times.ends_ns
        return self._recorded

    def advance(self) -> bool:
        """Continue at the recorded time. Return False at the end."""
        executor = self._recorded
        state = executor.num_steps, executor.num_results
        resume_ns = self._times.resumes_ns.get(state, 0)
        self.clock.advance(max(0, resume_ns - self.clock.now_ns()))
        return super().advance()


class _RecordedExecutor(SimExecutor):
    """Ends each step at its recorded time. num_results: number of results that were read."""

    ends_ns: Sequence[int] = ()
    num_results = 0

    def _end_ns(self, plan: SchedulerOutput, start_ns: int) -> int:
        if plan.step_id >= len(self.ends_ns):
            raise UserError(f"the recorded run has only {len(self.ends_ns)} steps")
        return self.ends_ns[plan.step_id]

    def end(
        self, plan: SchedulerOutput, planned_ns: int, start_ns: int, end_ns: int
    ) -> ModelRunnerOutput:
        """Advance the clock to the end of a step. Return its result."""
        self.num_results += 1
        return super().end(plan, planned_ns, start_ns, end_ns)


def _first(readings: Sequence[int], log: Path) -> int:
    if not readings:
        raise UserError(f"{str(log)!r} has a record without a time; it is not a log of a scheduler")
    return readings[0]

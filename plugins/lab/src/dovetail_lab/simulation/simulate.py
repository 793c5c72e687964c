"""Runs a workload on the engine core and the scheduler with a virtual clock.

The scheduler, its policy and the KV cache manager are those of the real engine; only the executor
and the clock differ. Given the same times, a simulated engine makes the same decisions.
"""

from __future__ import annotations

from pathlib import Path

from dovetail_lab.simulation.engine import RunLimits, SimulatedEngine
from dovetail_lab.simulation.results import RunResult, StepColumns
from dovetail_lab.simulation.setup import EngineSetup, StepTimeModel
from dovetail_lab.workloads.workload import Workload


def simulate(
    workload: Workload,
    setup: EngineSetup,
    step_times: StepTimeModel,
    *,
    macro_steps: bool = True,
    record_steps: bool = True,
    decision_log: Path | None = None,
    limits: RunLimits | None = None,
) -> RunResult:
    """Run a workload to its end. Return the times and counts of its requests.

    macro_steps: whether stretches of pure decode steps are computed at once, which is faster and
        gives the same result.
    record_steps: whether the result has the columns of the steps.
    decision_log: a new file for the decision log. Because the log contains every step,
        `macro_steps` then has no effect.
    limits: limits of wall time and steps; None for one hour.
    Raises DovetailError if the engine of `setup` cannot be created. If the scheduler or its policy
    fails during the run, the result has an error.
    """
    engine = SimulatedEngine(workload.requests, setup, step_times, decision_log=decision_log)
    engine.macro_steps = macro_steps and decision_log is None
    if record_steps:
        engine.steps = StepColumns()
    return engine.run(limits or RunLimits())

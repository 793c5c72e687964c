"""Runs one workload on the simulator or on the real engine."""

from __future__ import annotations

from pathlib import Path

from dovetail_lab.experiments.replica_runs import run_replicas
from dovetail_lab.experiments.run_key import RunKey
from dovetail_lab.experiments.spec import ExperimentSpec
from dovetail_lab.simulation.results import RunResult
from dovetail_lab.workloads.workload import Workload


def run_workload(
    spec: ExperimentSpec,
    key: RunKey,
    workload: Workload,
    *,
    trust_local_code: bool,
    decision_log: Path | None = None,
) -> RunResult:
    """Run a workload. Return the result, which contains the columns of the steps.

    decision_log: a new file for the decision log of one simulated engine. An error of the policy,
    raised or returned as `RunResult.error`, makes the run fail.
    """
    policy = spec.policy(key.policy)
    setup = spec.setup.setup(policy, key.seed, trust_local_code=trust_local_code)
    # Imported here, because each needs packages that the other one does not need.
    if key.engine == "real":
        from dovetail_lab.engine_runs import run_real

        real: RunResult = run_real(
            workload,
            setup,
            model=spec.setup.real_model,
            engine_options=spec.setup.engine_options,
        )
        return real
    from dovetail_lab.simulation.simulate import simulate

    step_times = spec.setup.step_time_reference.load()
    if spec.setup.replicas > 1:
        router = policy.router or spec.setup.router
        return run_replicas(spec.setup, workload, setup, step_times, router)
    return simulate(workload, setup, step_times, decision_log=decision_log)

"""Runs one workload of an experiment on several simulated replicas."""

from __future__ import annotations

from dovetail_lab.experiments.spec import EngineSpec
from dovetail_lab.replicas.cluster import simulate_replicas
from dovetail_lab.replicas.routers import Router, load_router
from dovetail_lab.replicas.split import simulate_split
from dovetail_lab.replicas.transfers import TransferCost
from dovetail_lab.simulation.results import RunResult
from dovetail_lab.simulation.setup import EngineSetup, StepTimeModel
from dovetail_lab.workloads.workload import Workload


def run_replicas(
    spec: EngineSpec,
    workload: Workload,
    setup: EngineSetup,
    step_times: StepTimeModel,
    router: str,
) -> RunResult:
    """Run a workload on replicas. Return their merged result.

    setup: the engine of each replica. router: the name of the router; if prefill and decode have
    separate pools, each pool gets such a router. Raises UserError if the router is unknown.
    """

    def make_router() -> Router:
        return load_router(router, trust_local_code=setup.trust_local_code)

    if not spec.prefill_replicas:
        setups = [setup] * spec.replicas
        return simulate_replicas(workload, setups, step_times, make_router()).as_run()
    cost = TransferCost(
        latency_ns=round(spec.transfer_latency_ms * 1e6),
        ps_per_token=round(spec.transfer_us_per_token * 1e6),
    )
    num_decode = spec.replicas - spec.prefill_replicas
    return simulate_split(
        workload,
        [setup] * spec.prefill_replicas,
        [setup] * num_decode,
        step_times,
        (make_router(), make_router()),
        cost=cost,
    ).as_run()

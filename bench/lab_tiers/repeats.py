"""T1: a run of the real engine, repeated in the simulator with its recorded times.

The decision logs of both runs (every plan, result and time) must be equal byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from dovetail.interfaces import SchedulerLimits
from dovetail.plugins import PluginRegistry
from dovetail_lab.real_engine.engine import RealEngine
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.step_times.recorded import repeat_run
from dovetail_lab.workloads.building import build_workload
from dovetail_lab.workloads.spec import WorkloadSpec
from dovetail_lab.workloads.workload import Workload
from lab_tiers.tables import Table

SOURCES = {
    "azure:conv": {"trace": "azure:conv"},
    "mooncake:synthetic": {"trace": "mooncake:synthetic"},
    "conversations": {"synthetic": "conversations"},
}
CACHES = {"ample": 300, "scarce": 24}
"""Number of blocks of 16 tokens; with 24 of them running requests are preempted."""
DEPTHS = 1, 2
MAX_MODEL_LEN, NUM_REQUESTS, RATE = 192, 12, 300.0


def run_repeats(log: Callable[[str], None], num_policies: int) -> Table:
    """Run every combination. num_policies: 0 for all installed policies."""
    table = Table(
        tier="T1",
        columns=("cache", "steps in flight", "runs", "with preemptions", "steps", "equal logs"),
    )
    policies = sorted({result.name for result in PluginRegistry().candidates("policy")})
    policies = policies[: num_policies or None]
    for depth in DEPTHS:
        with RealEngine("demo", _setup("fcfs", 300, depth, caching=True)) as engine:
            for cache in CACHES:
                cases = [*product(policies, SOURCES, (True, False))]
                counts = _run_cases(engine, cases, CACHES[cache], depth)
                equal, preempted, steps = (sum(column) for column in zip(*counts, strict=True))
                table.judged += len(cases)
                table.passed += equal
                shown = (len(cases), preempted, steps, equal)
                table.rows.append((cache, str(depth), *(f"{value:,}" for value in shown)))
                log(f"T1 {cache} depth {depth}: {equal} of {len(cases)} logs are equal")
    return table


def _run_cases(
    engine: RealEngine, cases: list[tuple[str, str, bool]], num_blocks: int, depth: int
) -> list[tuple[bool, bool, int]]:
    """Return (whether the logs are equal, whether requests were preempted, steps) of each case."""
    counts = []
    for policy, source, caching in cases:
        setup, workload = _setup(policy, num_blocks, depth, caching=caching), _workload(source)
        with TemporaryDirectory() as folder:
            real, again = Path(folder, "real.log"), Path(folder, "again.log")
            result = engine.run(workload, setup, decision_log=real)
            if result.error:
                raise RuntimeError(f"{policy} on {source}: {result.error}")
            repeated = repeat_run(workload, setup, real, decision_log=again)
            same = not repeated.error and real.read_bytes() == again.read_bytes()
        counts.append((same, result.num_preemptions > 0, result.num_steps))
    return counts


def _setup(policy: str, num_blocks: int, depth: int, *, caching: bool) -> EngineSetup:
    limits = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
    )
    return EngineSetup(scheduler=policy, limits=limits, num_blocks=num_blocks, depth=depth)


def _workload(source: str) -> Workload:
    spec = WorkloadSpec(
        **SOURCES[source],
        num_requests=NUM_REQUESTS,
        tenants=2,
        expected_tokens="noisy:0.5",
        max_tokens=32,
    )
    return build_workload(
        spec, rate=RATE, seed=0, num_seeds=1, max_model_len=MAX_MODEL_LEN
    ).workload

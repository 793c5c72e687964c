"""Code that the tiers share: their tables, their engine and their workloads."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dovetail.interfaces import SchedulerLimits
from dovetail_lab.experiments.run_metrics import Cut, measure_run
from dovetail_lab.simulation.results import RunResult
from dovetail_lab.simulation.setup import EngineSetup
from dovetail_lab.workloads.building import build_workload
from dovetail_lab.workloads.spec import WorkloadSpec
from dovetail_lab.workloads.workload import Workload

MAX_MODEL_LEN = 512
BLOCK_SIZE = 16


@dataclass(kw_only=True)
class Table:
    """A table of the page.

    judged: number of cells with a limit. passed: number of these that meet it. load: the mean load
    of the machine (runnable processes) at the start and at the end.
    """

    tier: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    passed: int = 0
    judged: int = 0
    load: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])

    def judge(self, ok: bool) -> str:
        """Count a cell with a limit. Return its verdict as a word."""
        self.judged += 1
        self.passed += ok
        return "yes" if ok else "**no**"

    def plain(self) -> dict[str, Any]:
        """Return the finished table as plain data, with the load at this time."""
        return {**vars(self), "load": [*self.load, os.getloadavg()[0]]}


def make_setup(
    scheduler: str = "fcfs", policy_options: Mapping[str, object] | None = None
) -> EngineSetup:
    """Return the engine that the tiers T2 to T4 measure."""
    limits = SchedulerLimits(
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=MAX_MODEL_LEN
    )
    return EngineSetup(
        scheduler=scheduler, limits=limits, num_blocks=601, policy_options=policy_options or {}
    )


def make_workload(source: dict[str, Any], num_requests: int, rate: float, seed: int) -> Workload:
    """Return requests of a source, cut to the length of the engine. rate: 0 for a burst."""
    spec = WorkloadSpec(num_requests=num_requests, expected_tokens="noisy:0.3", **source)
    built = build_workload(
        spec, rate=rate or float("inf"), seed=seed, num_seeds=8, max_model_len=MAX_MODEL_LEN
    )
    return built.workload


def metrics_of(result: RunResult, workload: Workload) -> dict[str, float | None]:
    """Return the metrics of a run. Raises RuntimeError if the run has failed."""
    if result.error:
        raise RuntimeError(result.error)
    cut = Cut(warmup=0.1, drain=0.1, min_p99=1)
    return dict(measure_run(result, workload.requests, cut, BLOCK_SIZE).values)

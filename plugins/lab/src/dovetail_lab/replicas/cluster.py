"""Simulates several replicas of an engine behind a router, in one or two pools.

Each replica is a `SimulatedEngine` with its own clock. The replica with the earliest clock runs
next. A request is routed before any replica starts a step after the request's arrival. A router
sees each replica in the state after the replica's step in progress.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dovetail.errors import DovetailError, UserError
from dovetail_lab.replicas.pool import ReplicaPool
from dovetail_lab.replicas.routers import Router
from dovetail_lab.simulation.arrival_queue import ArrivalQueue
from dovetail_lab.simulation.engine import RunLimits, SimulatedEngine
from dovetail_lab.simulation.prompts import Prompts
from dovetail_lab.simulation.results import RequestColumns, RunResult, StepColumns
from dovetail_lab.simulation.setup import EngineSetup, StepTimeModel
from dovetail_lab.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class ClusterResult:
    """The result of a run of several replicas.

    requests: the columns of all requests, in the order of the workload. replica_of: the index of
    each request's replica, or `UNROUTED` for a request that did not arrive. replicas: the result of
    each replica; the columns of its requests contain only those that were sent to it.
    error: why the run failed; "" for a complete run.
    """

    requests: RequestColumns
    replica_of: Sequence[int]
    replicas: tuple[RunResult, ...]
    end_ns: int
    host_ns: int
    error: str = ""

    def as_run(self) -> RunResult:
        """Merge the results into that of one engine: totals, and all replicas' steps by time.

        num_blocks and num_used_blocks are those of one replica.
        """

        def total(name: str) -> int:
            return sum(getattr(replica, name) for replica in self.replicas)

        return RunResult(
            requests=self.requests,
            steps=_merge_steps([item.steps for item in self.replicas if item.steps is not None]),
            num_steps=total("num_steps"),
            num_request_steps=total("num_request_steps"),
            end_ns=self.end_ns,
            host_ns=self.host_ns,
            scheduler_ns=total("scheduler_ns") // len(self.replicas),
            num_blocks=self.replicas[0].num_blocks,
            max_num_batched_tokens=self.replicas[0].max_num_batched_tokens,
            prefix_queries=total("prefix_queries"),
            prefix_hits=total("prefix_hits"),
            num_preemptions=total("num_preemptions"),
            num_recomputed_tokens=total("num_recomputed_tokens"),
            num_idle_steps=total("num_idle_steps"),
            error=self.error,
        )


def simulate_replicas(
    workload: Workload,
    setups: Sequence[EngineSetup],
    step_times: StepTimeModel,
    router: Router,
    *,
    limits: RunLimits | None = None,
) -> ClusterResult:
    """Run a workload on several replicas. Return the times and counts of its requests.

    setups: the engine of each replica. limits: limits of wall time and of steps, over all replicas;
    None for one hour. Raises UserError without replicas, and DovetailError if an engine cannot be
    created. If the router returns an invalid index, the result has an error.
    """
    if not setups:
        raise UserError("setups is empty; a cluster needs at least one replica.")
    requests = workload.requests
    arrivals, prompts = ArrivalQueue(requests), Prompts(requests)
    macro_steps = can_skip(workload)

    def make_engine(index: int, queue: ArrivalQueue) -> SimulatedEngine:
        engine = SimulatedEngine(
            requests, setups[index], step_times, arrivals=queue, prompts=prompts
        )
        engine.macro_steps = macro_steps
        engine.steps = StepColumns()
        return engine

    def end(number: int, now_ns: int | None) -> None:
        if now_ns is not None:
            arrivals.end(number, now_ns)

    pool = ReplicaPool(
        requests,
        arrivals,
        router,
        num_replicas=len(setups),
        make_engine=make_engine,
        horizon_ns=lambda: arrivals.next_ns,
        on_end=end,
    )
    run = run_pools([pool], limits or RunLimits())
    results = pool.results()
    return ClusterResult(
        requests=merge_columns(pool, results),
        replica_of=pool.replica_of,
        replicas=results,
        end_ns=max(result.end_ns for result in results),
        host_ns=run.host_ns,
        error=run.error,
    )


def can_skip(workload: Workload) -> bool:
    """Return whether replicas may compute stretches of decode steps at once.

    Returns False if the workload has follow-up requests: such a request arrives when its parent
    ends, which may be on another replica.
    """
    return not any(request.parent for request in workload.requests)


@dataclass(frozen=True, kw_only=True)
class PoolRun:
    """How a run of pools ended: its wall time, and its error or ""."""

    host_ns: int
    error: str


def run_pools(pools: Sequence[ReplicaPool], limits: RunLimits) -> PoolRun:
    """Run until all requests have ended, a limit is exceeded, or a policy or router fails."""
    begun_s = time.perf_counter()
    error = ""
    try:
        while _advance(pools) and not error:
            num_steps = sum(pool.num_steps for pool in pools)
            error = limits.excess(num_steps, time.perf_counter() - begun_s)
    except DovetailError as failure:
        error = str(failure)
    for pool in pools:
        pool.shutdown()
    return PoolRun(host_ns=int((time.perf_counter() - begun_s) * 1e9), error=error)


def _advance(pools: Sequence[ReplicaPool]) -> bool:
    """Route the next arrival, or run the replica with the earliest clock. Return False at end."""
    busy = [engine for pool in pools for engine in pool.busy]
    behind = min(busy, key=lambda engine: engine.clock.now_ns(), default=None)
    arriving = [(pool.arrivals.next_ns, pool) for pool in pools]
    known = [(next_ns, pool) for next_ns, pool in arriving if next_ns is not None]
    next_ns, pool = min(known, key=lambda pair: pair[0], default=(None, None))
    if (
        pool is not None
        and next_ns is not None
        and (behind is None or next_ns <= behind.clock.now_ns())
    ):
        pool.route_next()
    elif behind is not None:
        behind.advance()
    else:
        return False
    return True


def merge_columns(pool: ReplicaPool, results: Sequence[RunResult]) -> RequestColumns:
    """Merge the columns of all replicas: take each request's entries from its replica."""
    merged = RequestColumns()
    for field in fields(RequestColumns):
        columns = [getattr(result.requests, field.name) for result in results]
        getattr(merged, field.name).extend(
            columns[max(index, 0)][number] for number, index in enumerate(pool.replica_of)
        )
    return merged


def _merge_steps(columns: Sequence[StepColumns]) -> StepColumns:
    """Return the steps of all replicas, by their start."""
    rows = [row for steps in columns for row in zip(*_step_values(steps).values(), strict=True)]
    rows.sort()
    merged = StepColumns()
    for name, values in zip(_step_values(merged), zip(*rows, strict=True), strict=False):
        getattr(merged, name).extend(values)
    return merged


def _step_values(steps: StepColumns) -> dict[str, Sequence[int]]:
    return {field.name: getattr(steps, field.name) for field in fields(StepColumns)}

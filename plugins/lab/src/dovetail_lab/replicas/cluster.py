"""Simulates several replicas of an engine behind a router.

Each replica is a `SimulatedEngine` with its own clock. The replica whose clock is behind the others
runs next, and a request is routed before any replica starts a step after its arrival. A router sees
the replicas at the end of their steps in progress.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dovetail.errors import DovetailError, UserError
from dovetail_lab.replicas.routed_arrivals import RoutedArrivals
from dovetail_lab.replicas.routers import ArrivingRequest, ReplicaLoad, Router
from dovetail_lab.simulation.arrival_queue import ArrivalQueue
from dovetail_lab.simulation.engine import RunLimits, SimulatedEngine
from dovetail_lab.simulation.prompts import Prompts
from dovetail_lab.simulation.results import RequestColumns, RunResult
from dovetail_lab.simulation.setup import EngineSetup, StepTimeModel
from dovetail_lab.workloads.workload import Workload

UNROUTED = -1


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
    created or the router returns an invalid index.
    """
    if not setups:
        raise UserError("setups is empty; a cluster needs at least one replica.")
    return Cluster(workload, setups, step_times, router).run(limits or RunLimits())


class Cluster:
    """The replicas, and the requests that will arrive at them."""

    def __init__(
        self,
        workload: Workload,
        setups: Sequence[EngineSetup],
        step_times: StepTimeModel,
        router: Router,
    ) -> None:
        requests = workload.requests
        self._requests = requests
        self._router = router
        self._arrivals = ArrivalQueue(requests)
        self._replica_of = array("q", [UNROUTED]) * len(requests)
        self._num_unfinished = [0] * len(setups)
        self._num_prompt_tokens = [0] * len(setups)
        self._queues = [RoutedArrivals(self._next_arrival_ns, self._end) for _ in setups]
        prompts = Prompts(requests)
        # A request that follows another one may arrive earlier than any known arrival.
        skips = not any(request.parent for request in requests)
        self._engines = []
        for setup, queue in zip(setups, self._queues, strict=True):
            engine = SimulatedEngine(requests, setup, step_times, arrivals=queue, prompts=prompts)
            engine.macro_steps = skips
            self._engines.append(engine)

    def run(self, limits: RunLimits) -> ClusterResult:
        """Run until all requests have ended, or a limit is exceeded."""
        begun_s = time.perf_counter()
        error = ""
        try:
            while self._advance() and not error:
                num_steps = sum(engine.num_steps for engine in self._engines)
                error = limits.excess(num_steps, time.perf_counter() - begun_s)
        except DovetailError as failure:
            error = str(failure)
        results = tuple(engine.result() for engine in self._engines)
        for engine in self._engines:
            engine.shutdown()
        return ClusterResult(
            requests=self._merge(results),
            replica_of=self._replica_of,
            replicas=results,
            end_ns=max(result.end_ns for result in results),
            host_ns=int((time.perf_counter() - begun_s) * 1e9),
            error=error,
        )

    def _advance(self) -> bool:
        """Route the next arrival or run the replica that is behind. Return False at the end."""
        busy = [
            engine
            for engine, queue in zip(self._engines, self._queues, strict=True)
            if engine.has_work or not queue.is_empty
        ]
        behind = min(busy, key=lambda engine: engine.clock.now_ns(), default=None)
        next_ns = self._arrivals.next_ns
        if next_ns is not None and (behind is None or next_ns <= behind.clock.now_ns()):
            for number in self._arrivals.take(next_ns):
                self._route(number, next_ns)
        elif behind is not None:
            behind.advance()
        else:
            return False
        return True

    def _route(self, number: int, time_ns: int) -> None:
        request = self._requests[number]
        loads = [
            ReplicaLoad(
                num_waiting=engine.num_waiting,
                num_running=engine.num_running,
                num_unfinished=num_unfinished,
                num_prompt_tokens=num_prompt_tokens,
            )
            for engine, num_unfinished, num_prompt_tokens in zip(
                self._engines, self._num_unfinished, self._num_prompt_tokens, strict=True
            )
        ]
        index = self._router.choose(ArrivingRequest.of(request), loads)
        if type(index) is not int or not 0 <= index < len(loads):
            raise UserError(
                f"The router returned {index!r} for request {request.request_id!r}; it must return "
                f"the index of a replica, 0 to {len(loads) - 1}."
            )
        self._replica_of[number] = index
        self._num_unfinished[index] += 1
        self._num_prompt_tokens[index] += request.num_prompt_tokens
        engine = self._engines[index]
        if not engine.has_work and self._queues[index].is_empty:
            engine.clock.advance(max(0, time_ns - engine.clock.now_ns()))
        self._queues[index].push(number, self._arrivals.time_of(number))

    def _next_arrival_ns(self) -> int | None:
        return self._arrivals.next_ns

    def _end(self, number: int, now_ns: int | None) -> None:
        index = self._replica_of[number]
        self._num_unfinished[index] -= 1
        self._num_prompt_tokens[index] -= self._requests[number].num_prompt_tokens
        if now_ns is not None:
            self._arrivals.end(number, now_ns)

    def _merge(self, results: Sequence[RunResult]) -> RequestColumns:
        """Return columns with the entries of each request's replica."""
        merged = RequestColumns()
        for field in fields(RequestColumns):
            columns = [getattr(result.requests, field.name) for result in results]
            chosen = (
                columns[max(index, 0)][number] for number, index in enumerate(self._replica_of)
            )
            getattr(merged, field.name).extend(chosen)
        return merged

"""Several simulated engines behind a router, with the requests that arrive at them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dovetail.errors import UserError
from dovetail_lab.replicas.routed_arrivals import RoutedArrivals
from dovetail_lab.replicas.routers import ArrivingRequest, ReplicaLoad, Router
from dovetail_lab.simulation.arrival_queue import ArrivalQueue
from dovetail_lab.simulation.engine import SimulatedEngine
from dovetail_lab.simulation.results import RunResult
from dovetail_lab.workloads.workload import WorkloadRequest

UNROUTED = -1

MakeEngine = Callable[[int, ArrivalQueue], SimulatedEngine]
"""Creates the replica with the given index, which takes its requests from the given queue."""


@dataclass
class _Load:
    """The unfinished requests of a replica."""

    num_requests: int = 0
    num_prompt_tokens: int = 0


class ReplicaPool:
    """Replicas of an engine behind a router.

    requests: all requests that may arrive, by index. arrivals: when they arrive at the pool.
    horizon_ns: returns a time before which nothing outside of a replica can affect it; None for no
        limit. on_end: called with the index of each request that has ended, and the end time; None
        for a request that was rejected.
    replica_of: the replica of each request, or `UNROUTED`.
    """

    def __init__(
        self,
        requests: Sequence[WorkloadRequest],
        arrivals: ArrivalQueue,
        router: Router,
        *,
        num_replicas: int,
        make_engine: MakeEngine,
        horizon_ns: Callable[[], int | None],
        on_end: Callable[[int, int | None], None],
    ) -> None:
        self.requests = requests
        self.arrivals = arrivals
        self.replica_of = array("q", [UNROUTED]) * len(requests)
        self._router = router
        self._on_end = on_end
        self._loads = [_Load() for _ in range(num_replicas)]
        self._queues = [RoutedArrivals(horizon_ns, self._end) for _ in range(num_replicas)]
        self._engines = [make_engine(index, queue) for index, queue in enumerate(self._queues)]

    @property
    def busy(self) -> list[SimulatedEngine]:
        """The replicas that have or will get requests."""
        return [
            engine
            for engine, queue in zip(self._engines, self._queues, strict=True)
            if engine.has_work or not queue.is_empty
        ]

    @property
    def num_steps(self) -> int:
        """Number of steps of all replicas."""
        return sum(engine.num_steps for engine in self._engines)

    def route_next(self) -> None:
        """Route the requests that arrive next to replicas."""
        next_ns = self.arrivals.next_ns
        assert next_ns is not None
        for number in self.arrivals.take(next_ns):
            self._route(number, next_ns)

    def results(self) -> tuple[RunResult, ...]:
        """Return the results so far."""
        return tuple(engine.result() for engine in self._engines)

    def shutdown(self) -> None:
        """Release the schedulers."""
        for engine in self._engines:
            engine.shutdown()

    def _route(self, number: int, time_ns: int) -> None:
        request = self.requests[number]
        loads = [
            ReplicaLoad(
                num_waiting=engine.num_waiting,
                num_running=engine.num_running,
                num_unfinished=load.num_requests,
                num_prompt_tokens=load.num_prompt_tokens,
            )
            for engine, load in zip(self._engines, self._loads, strict=True)
        ]
        index = self._router.choose(ArrivingRequest.of(request), loads)
        if type(index) is not int or not 0 <= index < len(loads):
            raise UserError(
                f"The router returned {index!r} for request {request.request_id!r}; it must return "
                f"the index of a replica, 0 to {len(loads) - 1}."
            )
        self.replica_of[number] = index
        self._loads[index].num_requests += 1
        self._loads[index].num_prompt_tokens += request.num_prompt_tokens
        engine, queue = self._engines[index], self._queues[index]
        if not engine.has_work and queue.is_empty:
            engine.clock.advance(max(0, time_ns - engine.clock.now_ns()))
        queue.push(number, self.arrivals.time_of(number))

    def _end(self, number: int, now_ns: int | None) -> None:
        load = self._loads[self.replica_of[number]]
        load.num_requests -= 1
        load.num_prompt_tokens -= self.requests[number].num_prompt_tokens
        self._on_end(number, now_ns)

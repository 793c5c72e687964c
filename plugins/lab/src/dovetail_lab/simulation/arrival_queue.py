"""The arrivals of a workload: open-loop by time, and closed-loop after a parent has ended."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence

from dovetail_lab.simulation.results import NEVER
from dovetail_lab.workloads.workload import WorkloadRequest


class ArrivalQueue:
    """Yields the requests of a workload when they arrive, by their index in the workload."""

    def __init__(self, requests: Sequence[WorkloadRequest]) -> None:
        self._requests = requests
        numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._open = []
        for number, request in enumerate(requests):
            if request.parent:
                self._children[numbers[request.parent]].append(number)
            else:
                self._open.append(number)
        self._open_ns = [requests[number].arrival_ns for number in self._open]
        self._next = 0
        self._heap: list[tuple[int, int]] = []
        self._times: dict[int, int] = {}

    @property
    def next_ns(self) -> int | None:
        """The time of the next arrival, or None if no arrival is known."""
        open_ns = self._open_ns[self._next] if self._next < len(self._open_ns) else None
        if not self._heap:
            return open_ns
        heap_ns = self._heap[0][0]
        return heap_ns if open_ns is None else min(open_ns, heap_ns)

    def take(self, now_ns: int) -> Iterator[int]:
        """Yield the requests that have arrived, ordered by time, then by index."""
        while (next_ns := self.next_ns) is not None and next_ns <= now_ns:
            number = self._open[self._next] if self._next < len(self._open) else NEVER
            is_open = number != NEVER and self._requests[number].arrival_ns == next_ns
            if is_open and not (self._heap and self._heap[0] < (next_ns, number)):
                self._next += 1
            else:
                _, number = heapq.heappop(self._heap)
            yield number

    def time_of(self, number: int) -> int:
        """Return when a request arrived, in nanoseconds."""
        time_ns = self._times.pop(number, None)
        return self._requests[number].arrival_ns if time_ns is None else time_ns

    def push(self, number: int, time_ns: int) -> None:
        """Schedule the arrival of a request at `time_ns`."""
        self._times[number] = time_ns
        heapq.heappush(self._heap, (time_ns, number))

    def reject(self, number: int) -> None:
        """Handle the rejection of a request by the engine: its follow-up requests do not arrive."""

    def end(self, number: int, now_ns: int) -> None:
        """Schedule the arrivals of the follow-up requests of request `number`."""
        for child in self._children.pop(number, ()):
            request = self._requests[child]
            self.push(child, max(request.arrival_ns, now_ns + request.think_ns))

"""The requests without a batch slot, in their policy's order.

Two implementations: a heap if ranks never change, and a sort in every step if they may. Ties are
broken by arrival, so that every policy is deterministic. A request that loses its batch slot in a
step can be admitted again from the next step on.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dovetail.request import Request

Rank = Callable[[Request], Any]


class WaitingQueue(Protocol):
    """Waiting requests in the order of service.

    Iteration yields the requests that are ready in this step and skips removed ones. `len` counts
    all requests.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def num_ready(self) -> int:
        """Number of requests that are ready in this step."""

    def push(self, request: Request) -> None:
        """Add a new request."""

    def defer(self, request: Request) -> None:
        """Add a preempted request. It is ready from the next `begin_step` on."""

    def discard(self, request: Request) -> None:
        """Remove a request from the queue."""

    def begin_step(self) -> None:
        """Update the order. Called once before each step."""

    def peek(self) -> Request | None:
        """Return the request to be served next, or None if none is ready in this step."""


class HeapQueue:
    """A queue for ranks that never change: a heap, from which removed entries are deleted later."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._tickets: dict[int, int] = {}
        self._late: dict[int, Request] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._tickets) + len(self._late)

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the heap, best first. K entries take O(k log k).

        The heap does not change.
        """
        heap, tickets = self._heap, self._tickets
        edge = [(heap[0][:3], 0)] if heap else []
        while edge:
            (_, sequence, ticket), index = heapq.heappop(edge)
            if tickets.get(sequence) == ticket:
                yield heap[index][3]
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child][:3], child))

    @property
    def num_ready(self) -> int:
        """Number of requests that are ready in this step."""
        return len(self._tickets)

    def push(self, request: Request) -> None:
        """Add a new request."""
        self._num_pushed += 1
        entry = (self._rank(request), request.sequence, self._num_pushed, request)
        heapq.heappush(self._heap, entry)
        self._tickets[request.sequence] = self._num_pushed

    def defer(self, request: Request) -> None:
        """Add a preempted request. It is ready from the next `begin_step` on."""
        self._late[request.sequence] = request

    def discard(self, request: Request) -> None:
        """Remove a request from the queue. Its entry in the heap is dropped when a step begins."""
        if self._late.pop(request.sequence, None) is None:
            del self._tickets[request.sequence]

    def begin_step(self) -> None:
        """Delete removed entries if there are many. Add the deferred requests."""
        heap = self._heap
        if len(heap) > 2 * len(self._tickets) + 16:
            heap[:] = [entry for entry in heap if self._tickets.get(entry[1]) == entry[2]]
            heapq.heapify(heap)
        while self._late:
            self.push(self._late.pop(next(iter(self._late))))
        self.peek()

    def peek(self) -> Request | None:
        """Return the request with the lowest rank, or None if there is none."""
        heap = self._heap
        while heap and self._tickets.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None


class SortedQueue:
    """A queue for ranks that may change: sorted once per step, when the order is first read."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._requests: dict[int, Request] = {}
        self._late: dict[int, Request] = {}
        self._order: list[Request] | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self._requests) + len(self._late)

    def __iter__(self) -> Iterator[Request]:
        requests = self._requests
        return (request for request in self._sorted() if request.sequence in requests)

    @property
    def num_ready(self) -> int:
        """Number of requests that are ready in this step."""
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Add a new request."""
        self._requests[request.sequence] = request
        self._order = None

    def defer(self, request: Request) -> None:
        """Add a preempted request. It is ready from the next `begin_step` on."""
        self._late[request.sequence] = request

    def discard(self, request: Request) -> None:
        """Remove a request from the queue."""
        if self._late.pop(request.sequence, None) is None:
            del self._requests[request.sequence]

    def begin_step(self) -> None:
        """Add the deferred requests and discard the order, so that every rank is recomputed."""
        self._requests |= self._late
        self._late.clear()
        self._order = None

    def peek(self) -> Request | None:
        """Return the request with the lowest rank, or None if no more are ready in this step."""
        order = self._sorted()
        while self._next < len(order) and order[self._next].sequence not in self._requests:
            self._next += 1
        return order[self._next] if self._next < len(order) else None

    def _sorted(self) -> list[Request]:
        if self._order is None:
            arrived = sorted(self._requests.values(), key=lambda request: request.sequence)
            self._order = sorted(arrived, key=self._rank)
            self._next = 0
        return self._order

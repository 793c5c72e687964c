"""The requests without a row, in their policy's order.

Two kinds behind one face: a heap where ranks never change, a sort at every step where they may.
Ties go by arrival, so that every policy is deterministic. Whoever loses its row in a step has a
place from the next step on: nobody comes and goes within one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dovetail.request import Request

Rank = Callable[[Request], Any]


class WaitingQueue(Protocol):
    """Requests that wait, the next to be served first.

    Iterating gives those that have a place in this step, in order; who is taken out meanwhile is
    left out. `len` counts all.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    @property
    def num_ready(self) -> int:
        """How many have a place in this step."""

    def push(self, request: Request) -> None:
        """Take a new request in."""

    def defer(self, request: Request) -> None:
        """Take a preempted request in; it has a place from the next `begin_step` on."""

    def discard(self, request: Request) -> None:
        """Take out a request that is in."""

    def begin_step(self) -> None:
        """Bring the order up to date; called once before each step."""

    def peek(self) -> Request | None:
        """Return the request to be served next, or None if nobody has a place in this step."""


class HeapQueue:
    """For ranks that never change: a heap with holes where requests were taken out."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._tickets: dict[int, int] = {}
        self._late: dict[int, Request] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._tickets) + len(self._late)

    def __iter__(self) -> Iterator[Request]:
        """Walk the heap best first: the first k take O(k log k), and nothing is moved."""
        heap, tickets = self._heap, self._tickets
        edge = [(heap[0][:3], 0)] if heap else []
        while edge:
            (_, sequence, ticket), place = heapq.heappop(edge)
            if tickets.get(sequence) == ticket:
                yield heap[place][3]
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(edge, (heap[child][:3], child))

    @property
    def num_ready(self) -> int:
        """How many have a place in this step."""
        return len(self._tickets)

    def push(self, request: Request) -> None:
        """Take a new request in."""
        self._num_pushed += 1
        entry = (self._rank(request), request.sequence, self._num_pushed, request)
        heapq.heappush(self._heap, entry)
        self._tickets[request.sequence] = self._num_pushed

    def defer(self, request: Request) -> None:
        """Take a preempted request in; it has a place from the next `begin_step` on."""
        self._late[request.sequence] = request

    def discard(self, request: Request) -> None:
        """Take out a request that is in; its entry is dropped when a step begins."""
        if self._late.pop(request.sequence, None) is None:
            del self._tickets[request.sequence]

    def begin_step(self) -> None:
        """Drop the entries of those that were taken out where that is cheap; let the late in."""
        heap = self._heap
        if len(heap) > 2 * len(self._tickets) + 16:
            heap[:] = [entry for entry in heap if self._tickets.get(entry[1]) == entry[2]]
            heapq.heapify(heap)
        while self._late:
            self.push(self._late.pop(next(iter(self._late))))
        self.peek()

    def peek(self) -> Request | None:
        """Return the request of the lowest rank, or None if there is none."""
        heap = self._heap
        while heap and self._tickets.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None


class SortedQueue:
    """For ranks that may change: sorted once a step, when the order is first asked for."""

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
        """How many have a place in this step."""
        return len(self._requests)

    def push(self, request: Request) -> None:
        """Take a new request in."""
        self._requests[request.sequence] = request
        self._order = None

    def defer(self, request: Request) -> None:
        """Take a preempted request in; it has a place from the next `begin_step` on."""
        self._late[request.sequence] = request

    def discard(self, request: Request) -> None:
        """Take out a request that is in."""
        if self._late.pop(request.sequence, None) is None:
            del self._requests[request.sequence]

    def begin_step(self) -> None:
        """Let the late in, and forget the order: every rank is asked for again."""
        self._requests |= self._late
        self._late.clear()
        self._order = None

    def peek(self) -> Request | None:
        """Return the request of the lowest rank, or None if nobody is left of this step's order."""
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

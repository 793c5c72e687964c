"""The requests without a row, in their policy's order.

Two kinds behind one face: a heap where ranks never change, a sort at every step where they may.
Ties go by arrival, so that every policy is deterministic.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from dovetail.request import Request

Rank = Callable[[Request], Any]


class WaitingQueue(Protocol):
    """Requests that wait, the next to be served first."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...

    def push(self, request: Request) -> None:
        """Take a request in, new or preempted."""

    def discard(self, request: Request) -> None:
        """Take out a request that is in."""

    def begin_step(self) -> None:
        """Bring the order up to date; called once before the `peek`s of a step."""

    def peek(self) -> Request | None:
        """Return the request to be served next, or None if nobody has a place in this step.

        Requests may be left then: those that were pushed since `begin_step`.
        """

    def pop(self) -> Request:
        """Take out and return what `peek` returns; raise IndexError if that is None."""


class HeapQueue:
    """For ranks that never change: a heap with holes where requests were taken out."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._heap: list[tuple[Any, int, int, Request]] = []
        self._tickets: dict[int, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Request]:
        alive = (e for e in self._heap if self._tickets.get(e[1]) == e[2])
        return (request for _, _, _, request in sorted(alive, key=lambda e: e[:3]))

    def push(self, request: Request) -> None:
        """Take a request in, new or preempted."""
        self._num_pushed += 1
        self._tickets[request.sequence] = self._num_pushed
        entry = (self._rank(request), request.sequence, self._num_pushed, request)
        heapq.heappush(self._heap, entry)

    def discard(self, request: Request) -> None:
        """Take out a request that is in; its entry is dropped when it comes to the top."""
        del self._tickets[request.sequence]

    def begin_step(self) -> None:
        """Do nothing: the order stands."""

    def peek(self) -> Request | None:
        """Return the request of the lowest rank, or None if there is none."""
        heap = self._heap
        while heap and self._tickets.get(heap[0][1]) != heap[0][2]:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def pop(self) -> Request:
        """Take out and return what `peek` returns; raise IndexError if that is None."""
        self.peek()
        request = heapq.heappop(self._heap)[3]
        del self._tickets[request.sequence]
        return request


class SortedQueue:
    """For ranks that may change: sorted once a step."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._requests: dict[int, Request] = {}
        self._order: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        self.begin_step()
        return reversed(self._order)

    def push(self, request: Request) -> None:
        """Take a request in, new or preempted; it has a place from the next `begin_step` on."""
        self._requests[request.sequence] = request

    def discard(self, request: Request) -> None:
        """Take out a request that is in."""
        del self._requests[request.sequence]

    def begin_step(self) -> None:
        """Ask for every rank and sort; the best one last."""
        key = self._rank
        ranked = sorted(self._requests.values(), key=lambda request: request.sequence)
        self._order = sorted(ranked, key=key)[::-1]

    def peek(self) -> Request | None:
        """Return the request of the lowest rank, or None if nobody is left of this step's order."""
        while self._order and self._order[-1].sequence not in self._requests:
            self._order.pop()
        return self._order[-1] if self._order else None

    def pop(self) -> Request:
        """Take out and return what `peek` returns; raise IndexError if that is None."""
        self.peek()
        request = self._order.pop()
        del self._requests[request.sequence]
        return request

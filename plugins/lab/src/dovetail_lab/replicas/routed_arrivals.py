"""The arrivals at one replica: the requests that a router has sent to it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from dovetail_lab.simulation.arrival_queue import ArrivalQueue


class RoutedArrivals(ArrivalQueue):
    """Requests by time of arrival. A replica must not skip past the next arrival at any replica.

    horizon_ns: returns the time of the next arrival at any replica, or None.
    on_end: called with the index of each request that has ended, and the end time; None if the
        engine rejected the request.
    """

    def __init__(
        self, horizon_ns: Callable[[], int | None], on_end: Callable[[int, int | None], None]
    ) -> None:
        super().__init__(())
        self._horizon_ns = horizon_ns
        self._on_end = on_end

    @property
    def is_empty(self) -> bool:
        """Whether no request is queued."""
        return not self._heap

    @property
    def next_ns(self) -> int | None:
        """The time of the next arrival at any replica, or None if none is known."""
        times = [self._heap[0][0]] if self._heap else []
        if (horizon_ns := self._horizon_ns()) is not None:
            times.append(horizon_ns)
        return min(times, default=None)

    def take(self, now_ns: int) -> Iterator[int]:
        """Yield the queued requests that have arrived, ordered by time, then by index."""
        while self._heap and self._heap[0][0] <= now_ns:
            yield heapq.heappop(self._heap)[1]

    def time_of(self, number: int) -> int:
        """Return when a request arrived, in nanoseconds."""
        return self._times.pop(number)

    def reject(self, number: int) -> None:
        """Report that the engine rejected a request."""
        self._on_end(number, None)

    def end(self, number: int, now_ns: int) -> None:
        """Report the end of a request."""
        self._on_end(number, now_ns)

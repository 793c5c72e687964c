"""Limits the requests that a server serves at the same time, before their bodies are read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.clock import Clock
from dovetail_server.protocol.errors import APIError

MAX_RETRY_AFTER_S = 60.0
_WEIGHT = 0.1


class Admission:
    """Counts the running requests. num_running: requests between `enter` and their end."""

    def __init__(self, clock: Clock) -> None:
        self.num_running = 0
        self._clock = clock
        self._mean_s = 1.0

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a refused client should retry: the mean of recent durations."""
        return min(max(self._mean_s, 1.0), MAX_RETRY_AFTER_S)

    @contextmanager
    def enter(self, limit: int) -> Iterator[None]:
        """Count a request while it is served; raise APIError if `limit` requests are running."""
        if self.num_running >= limit:
            raise self.queue_full()
        self.num_running += 1
        start_ns = self._clock.now_ns()
        try:
            yield
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            self._mean_s += _WEIGHT * (seconds - self._mean_s)
        finally:
            self.num_running -= 1

    def queue_full(self) -> APIError:
        """Return the error for a request above the limit."""
        return APIError(
            "The queue of the server is full. Try again later.",
            status=429,
            code="queue_full",
            retry_after_s=self.retry_after_s,
        )

"""Limits the requests that a server serves at the same time, before their bodies are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.clock import Clock
from dovetail_server.protocol.errors import APIError

MAX_RETRY_AFTER_S = 60
_WEIGHT = 0.1


class Admission:
    """Counts the running requests, and computes when rejected clients should retry.

    num_running: number of requests inside the context of `enter`.

    The retry delay grows with the number of rejected clients whose retry time is still in the
    future, because the server finishes about `limit` requests in one mean request duration. Retries
    therefore arrive at the rate at which the server finishes requests, and rejections take little
    of its CPU time, however many clients there are.
    """

    def __init__(self, clock: Clock) -> None:
        self.num_running = 0
        self._clock = clock
        self._mean_s = 1.0
        self._retries: Counter[int] = Counter()  # clock second -> clients that retry then

    @contextmanager
    def enter(self, limit: int) -> Iterator[None]:
        """Count a request within the context. Raise APIError if `limit` requests are running."""
        if self.num_running >= limit:
            raise self._queue_full(limit)
        self.num_running += 1
        start_ns = self._clock.now_ns()
        try:
            yield
            seconds = (self._clock.now_ns() - start_ns) / 1e9
            self._mean_s += _WEIGHT * (seconds - self._mean_s)
        finally:
            self.num_running -= 1

    def _queue_full(self, limit: int) -> APIError:
        return APIError(
            "The queue of the server is full. Try again later.",
            status=429,
            code="queue_full",
            retry_after_s=self._next_retry_after_s(limit),
        )

    def _next_retry_after_s(self, limit: int) -> int:
        """Return the number of seconds after which the next rejected client should retry.

        Count this client.
        """
        now_s = self._clock.now_ns() // 1_000_000_000
        for second in [retry for retry in self._retries if retry <= now_s]:
            del self._retries[second]
        wait_s = self._mean_s * (1 + self._retries.total() / max(limit, 1))
        retry_after_s = min(max(round(wait_s), 1), MAX_RETRY_AFTER_S)
        self._retries[now_s + retry_after_s] += 1
        return retry_after_s

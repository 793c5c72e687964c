"""Detects callbacks that block the event loop: other requests wait while one runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

MAX_BLOCKED_S = 0.05
"""CPU time of one iteration of the event loop, in seconds, above which the probe warns."""

_PERIOD_S = 0.01
_MIN_SECONDS_BETWEEN_WARNINGS = 10.0


class LoopProbe:
    """Warns if one iteration of the event loop takes more than `MAX_BLOCKED_S`.

    A timer measures the CPU time of the loop's thread, so a busy machine causes no warning. The
    timer runs only while requests are served. At most one warning is logged in 10 s.
    """

    def __init__(self) -> None:
        self._num_watched = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_s = 0.0
        self._next_warning_s = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Measure the event loop within the context, and until its next iteration."""
        self._num_watched += 1
        if self._timer is None:
            self._last_s = time.thread_time()
            self._start()
        try:
            yield
        finally:
            self._num_watched -= 1

    def _start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_PERIOD_S, self._measure)

    def _measure(self) -> None:
        now_s = time.thread_time()
        blocked_s, self._last_s = now_s - self._last_s, now_s
        if blocked_s > MAX_BLOCKED_S:
            self._warn(blocked_s)
        self._timer = None
        if self._num_watched:
            self._start()

    def _warn(self, blocked_s: float) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_warning_s:
            self._next_warning_s = now_s + _MIN_SECONDS_BETWEEN_WARNINGS
            logger.warning(
                "A request blocked the event loop for %.0f ms of CPU time.", 1000 * blocked_s
            )

"""Time, injected. The only module of the core that may call `time.*`.

Every time is an integer count of nanoseconds from an arbitrary, monotonic origin, so that a
scheduler decides the same in production, in a test and in a simulator.
"""

from __future__ import annotations

import time
from typing import Protocol


def sleep(seconds: float) -> None:
    """Let this thread wait."""
    time.sleep(seconds)


class Clock(Protocol):
    """Where the engine reads the time."""

    def now_ns(self) -> int:
        """Return a monotonic time in nanoseconds."""
        ...


class MonotonicClock:
    """The machine's own monotonic clock."""

    now_ns = staticmethod(time.monotonic_ns)


class ManualClock:
    """A clock that stands still until it is told to move; for tests and simulators."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the time last set, in nanoseconds."""
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        """Move on by `delta_ns` nanoseconds; raise ValueError if that is backwards."""
        if delta_ns < 0:
            raise ValueError(f"a clock cannot go back: advance({delta_ns})")
        self._now_ns += delta_ns

"""Clocks, which are passed as arguments. Only this module of the core may call `time.*`.

Times are integers: nanoseconds from an arbitrary, monotonic origin. So a scheduler makes the same
decisions in production, in a test and in a simulator.
"""

from __future__ import annotations

import time
from typing import Protocol


def sleep(seconds: float) -> None:
    """Block this thread for `seconds` seconds."""
    time.sleep(seconds)


class Clock(Protocol):
    """The interface of a clock."""

    def now_ns(self) -> int:
        """Return a monotonic time in nanoseconds."""
        ...


class MonotonicClock:
    """The monotonic clock of the machine."""

    now_ns = staticmethod(time.monotonic_ns)


class ManualClock:
    """A clock that only `advance` moves, for tests and simulators."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        """Return the current time in nanoseconds."""
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        """Advance by `delta_ns` nanoseconds. Raise ValueError if it is negative."""
        if delta_ns < 0:
            raise ValueError(f"delta_ns={delta_ns} must not be negative")
        self._now_ns += delta_ns

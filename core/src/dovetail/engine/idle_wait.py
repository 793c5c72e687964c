"""Defines how long an engine waits between steps while no request can run.

Requests may wait for a grammar, for blocks that a KV connector loads, or for a policy to let them
run. None of these can wake the engine, so it polls: first immediately, then after 1 ms, and then
at growing intervals. A new message ends the wait.
"""

from __future__ import annotations

from dovetail.clock import Clock

NUM_FREE = 2
"""Number of idle steps before the first wait; they are immediate, as blocks may become free."""

FIRST_NS = 1_000_000
LONGEST_NS = 10_000_000


class IdleWait:
    """Counts consecutive steps in which no request ran."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_idle = 0
        self._until_ns = 0

    def end(self) -> None:
        """End the wait: a request ran, or a message arrived."""
        self._num_idle = 0
        self._until_ns = 0

    def extend(self) -> None:
        """Record that no request ran in a step. Wait longer before the next step."""
        self._num_idle += 1
        if self._num_idle > NUM_FREE:
            exponent = min(self._num_idle - NUM_FREE - 1, 8)
            self._until_ns = self._clock.now_ns() + min(FIRST_NS << exponent, LONGEST_NS)

    @property
    def remaining_s(self) -> float:
        """Seconds until the next step is due, or 0.0 if it is due now."""
        if not self._until_ns:
            return 0.0
        return max(0, self._until_ns - self._clock.now_ns()) / 1e9

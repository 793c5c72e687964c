"""How long an engine waits between steps in which nothing runs.

Requests may wait for a grammar, for blocks that a KV connector loads, or for a policy to let them
run. None of them can wake the engine: it has to ask. So it asks at once, then after 1 ms, and then
less and less often; a new message is answered at once all the same.
"""

from __future__ import annotations

from dovetail.clock import Clock

NUM_FREE = 2
"""Steps without a run that follow each other at once: rows and blocks may have come free."""

FIRST_NS = 1_000_000
LONGEST_NS = 10_000_000


class IdleWait:
    """Counts steps in which nothing ran, one after the other."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_idle = 0
        self._until_ns = 0

    def end(self) -> None:
        """Wait no longer: something ran, or somebody asked for something."""
        self._num_idle = 0
        self._until_ns = 0

    def extend(self) -> None:
        """Note that one more step has brought nothing."""
        self._num_idle += 1
        if self._num_idle > NUM_FREE:
            exponent = min(self._num_idle - NUM_FREE - 1, 8)
            self._until_ns = self._clock.now_ns() + min(FIRST_NS << exponent, LONGEST_NS)

    @property
    def remaining_s(self) -> float:
        """Seconds until the next step is due; 0.0 if it is due now."""
        if not self._until_ns:
            return 0.0
        return max(0, self._until_ns - self._clock.now_ns()) / 1e9

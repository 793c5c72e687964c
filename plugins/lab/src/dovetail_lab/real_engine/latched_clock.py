"""A clock of real time that changes only when the run loop reads it.

As in the simulator, the scheduler of a real run sees two times per step: one when the step is
planned and one when its result arrives. A decision log therefore contains every time that the
scheduler saw, and a simulation with the recorded times repeats the log byte for byte.
"""

from __future__ import annotations

from dovetail.clock import Clock, ManualClock, MonotonicClock, sleep

_SPIN_NS = 200_000
"""The last part of a wait, in ns, is a busy wait, because a sleep may end late."""


class LatchedClock(ManualClock):
    """Nanoseconds since `restart`, read from another clock by `latch`."""

    def __init__(self, clock: Clock | None = None) -> None:
        """clock: the clock to read; None for the monotonic clock of the machine."""
        super().__init__()
        self._clock = clock or MonotonicClock()
        self._start_ns = self._clock.now_ns()

    def restart(self) -> None:
        """Set the current time to 0. Call this only before the first `latch`."""
        self._start_ns = self._clock.now_ns()

    def latch(self) -> int:
        """Read the wrapped clock. Until the next call, `now_ns` returns this time."""
        super().advance(max(0, self._clock.now_ns() - self._start_ns - self.now_ns()))
        return self.now_ns()

    def advance(self, delta_ns: int) -> None:
        """Wait until `delta_ns` nanoseconds after the current time. Raise ValueError if negative.

        The clock may then be later than requested. With `delta_ns=0`, the time does not change.
        """
        if delta_ns < 0:
            raise ValueError(f"delta_ns={delta_ns} must not be negative")
        if not delta_ns:
            return
        end_ns = self.now_ns() + delta_ns
        while (left_ns := end_ns - self.latch()) > 0:
            if left_ns > _SPIN_NS:
                sleep((left_ns - _SPIN_NS) / 1e9)

"""Decides when to restart an engine that failed: with growing delays, up to a limit."""

from __future__ import annotations

from collections import deque

from dovetail.clock import Clock
from dovetail.engine.supervision.rules import SupervisionRules


class Restarts:
    """Counts the failures of one engine's processes. Not thread-safe.

    A failure that is attributed to a request does not count towards `max_restarts`, because the
    engine itself works. If `max_restarts` is 0, every failure counts.
    """

    def __init__(self, rules: SupervisionRules, clock: Clock) -> None:
        self._rules = rules
        self._clock = clock
        self._failures_ns: deque[int] = deque()
        self._counted_ns: deque[int] = deque()

    @property
    def num_failures(self) -> int:
        """The number of counted failures within the window, as of the last failure."""
        return len(self._counted_ns)

    @property
    def num_left(self) -> int:
        """The number of restarts that would be left in the window if every failure counted."""
        return max(0, self._rules.max_restarts - len(self._failures_ns))

    def next_delay_s(self, *, is_by_request: bool = False) -> float | None:
        """Record a failure. Return the delay of the next start, or None for no restart.

        is_by_request: whether a request is to blame.
        """
        rules, now_ns = self._rules, self._clock.now_ns()
        for deaths in (self._failures_ns, self._counted_ns):
            while deaths and now_ns - deaths[0] > rules.window_s * 1e9:
                deaths.popleft()
        self._failures_ns.append(now_ns)
        if is_by_request and rules.max_restarts:
            return rules.first_delay_s
        self._counted_ns.append(now_ns)
        if len(self._counted_ns) > rules.max_restarts:
            return None
        return min(rules.max_delay_s, rules.first_delay_s * 2.0 ** (len(self._counted_ns) - 1))

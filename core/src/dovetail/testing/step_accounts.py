"""What a scheduler's plans say of its preemptions, held against what its statistics say.

Knows plans only: a request that joins again has lost its row, and what runs again was computed in
vain. Counts from below: evictions that no plan shows are the scheduler's to tell.
"""

from __future__ import annotations

from dovetail.interfaces.scheduler import SchedulerStats
from dovetail.plan import SchedulerOutput
from dovetail.testing.expectation import expect


class StepAccounts:
    """Accounts of one scheduler's life, from its plans. idle: no request was ever added."""

    def __init__(self) -> None:
        self.idle = True
        self._reached: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._num_rejoined = 0
        self._num_again = 0
        self._sums = (0, 0, 0, 0)

    def add(self, request_id: str) -> None:
        """Note a new request; its id may be that of one that has ended."""
        self.idle = False
        self._reached.pop(request_id, None)

    def take(self, plan: SchedulerOutput) -> None:
        """Note a plan."""
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        for request in plan.joins:
            name = self._names[request.row] = request.request_id
            if name in self._reached:
                self._num_rejoined += 1
                self._num_again += max(0, self._reached[name] - starts.get(request.row, 0))
            self._reached.setdefault(name, 0)
        for row, start, count in zip(plan.rows, plan.starts, plan.num_tokens, strict=True):
            self._reached[self._names[row]] = start + count

    def check(self, stats: SchedulerStats) -> None:
        """Hold statistics against the plans so far; raise AssertionError with what differs."""
        sums = (
            stats.prefix_queries,
            stats.prefix_hits,
            stats.num_preemptions,
            stats.num_recomputed_tokens,
        )
        grown = all(new >= old for new, old in zip(sums, self._sums, strict=True))
        expect(grown and sums[1] <= sums[0], f"{stats}: a sum shrank, or more hits than queries")
        expect(not self.idle or not any(sums), f"{stats}, of a scheduler that had no request")
        expect(
            stats.num_preemptions >= self._num_rejoined,
            f"{stats}, but {self._num_rejoined} times a request has joined again",
        )
        expect(
            stats.num_recomputed_tokens >= self._num_again,
            f"{stats}, but {self._num_again} tokens were computed again",
        )
        self._sums = sums

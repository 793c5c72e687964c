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
        self._sums = (0,) * 6

    def add(self, request_id: str) -> None:
        """Note a new request; its id may be that of one that has ended."""
        self.idle = False
        self._reached.pop(request_id, None)

    def take(self, plan: SchedulerOutput) -> None:
        """Note a plan."""
        for request in plan.joins:
            name = self._names[request.row] = request.request_id
            self._num_rejoined += name in self._reached
            self._reached.setdefault(name, 0)
        drafts = plan.num_drafts or bytes(len(plan.rows))
        runs = zip(plan.rows, plan.starts, plan.num_tokens, drafts, strict=True)
        for row, start, count, num_drafts in runs:
            name, end = self._names[row], start + count - num_drafts
            reached = self._reached[name]
            self._num_again += max(0, min(end, reached) - start)
            self._reached[name] = max(end, reached)

    def check(self, stats: SchedulerStats) -> None:
        """Hold statistics against the plans so far; raise AssertionError with what differs."""
        sums = (
            stats.prefix_queries,
            stats.prefix_hits,
            stats.num_preemptions,
            stats.num_recomputed_tokens,
            stats.num_evictions,
            stats.num_aborted,
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
        _check_blocks(stats)


def _check_blocks(stats: SchedulerStats) -> None:
    used, cached, most = stats.num_used_blocks, stats.num_cached_blocks, stats.num_blocks
    expect(0 <= used <= most and 0 <= cached <= most, f"{stats}: more blocks than there are")
    share = used / most if most else stats.kv_cache_usage  # 0: it does not count them
    expect(abs(share - stats.kv_cache_usage) < 1e-9, f"{stats}: kv_cache_usage is another share")
    expect(stats.schedule_ns >= 0 and stats.update_ns >= 0, f"{stats}: time runs backwards")

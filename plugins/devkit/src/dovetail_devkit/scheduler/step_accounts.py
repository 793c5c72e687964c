"""Compares the statistics of a scheduler with the preemptions in its plans.

This module uses only plans. A request that gets a row again was preempted, and its tokens are
recomputed. The counts are lower limits, because not every preemption appears in a plan.
"""

from __future__ import annotations

from collections import deque

from dovetail.interfaces.scheduler import SchedulerStats
from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.expectation import expect

_SUMS = (
    "prefix_queries",
    "prefix_hits",
    "num_preemptions",
    "num_recomputed_tokens",
    "num_evictions",
    "num_aborted",
)
"""Statistics that never decrease."""


class StepAccounts:
    """Counts readmissions and recomputed tokens in the plans of one scheduler.

    idle: whether no request has been added yet.
    """

    def __init__(self) -> None:
        self.idle = True
        self._reached: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._out: deque[list[str]] = deque()
        self._num_rejoined = 0
        self._num_again = 0
        self._sums = (0,) * len(_SUMS)

    def add(self, request_id: str) -> None:
        """Record a new request. The id of an ended request may be reused."""
        self.idle = False
        self._reached.pop(request_id, None)

    def take(self, plan: SchedulerOutput) -> None:
        """Record a plan."""
        for request in plan.joins:
            name = self._names[request.row] = request.request_id
            self._num_rejoined += name in self._reached
            self._reached.setdefault(name, 0)
        for row, start, count in zip(plan.rows, plan.starts, plan.num_tokens, strict=True):
            name, end = self._names[row], start + count
            reached = self._reached[name]
            self._num_again += max(0, min(end, reached) - start)
            self._reached[name] = max(end, reached)
        self._out.append([self._names[row] for row in plan.rows])

    def settle(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Record the result of the oldest plan in flight. Rejected drafts do not count."""
        names = self._out.popleft()
        runs = zip(names, plan.num_drafts, result.num_sampled, strict=False)
        for name, num_drafts, num_sampled in runs:
            if num_sampled and name in self._reached:
                self._reached[name] -= 1 + num_drafts - num_sampled

    def check(self, stats: SchedulerStats) -> None:
        """Compare statistics with the plans so far. Raise AssertionError with the difference."""
        sums = tuple(getattr(stats, name) for name in _SUMS)
        for name, new, old in zip(_SUMS, sums, self._sums, strict=True):
            expect(
                new >= old,
                f"the statistics have {name}={new} after {old}; this counter must not decrease",
            )
            expect(
                not self.idle or not new,
                f"the statistics have {name}={new} before the first request; expected 0",
            )
        expect(
            stats.prefix_hits <= stats.prefix_queries,
            f"the statistics have prefix_hits={stats.prefix_hits}, which is more than "
            f"prefix_queries={stats.prefix_queries}",
        )
        expect(
            stats.num_preemptions >= self._num_rejoined,
            f"the statistics have num_preemptions={stats.num_preemptions}; expected at least "
            f"{self._num_rejoined}, because plans readmit requests this often",
        )
        expect(
            stats.num_recomputed_tokens >= self._num_again,
            f"the statistics have num_recomputed_tokens={stats.num_recomputed_tokens}; expected "
            f"at least {self._num_again}, because plans recompute this many tokens",
        )
        self._sums = sums
        _check_blocks(stats)


def _check_blocks(stats: SchedulerStats) -> None:
    used, maximum = stats.num_used_blocks, stats.num_blocks
    for name in ("num_used_blocks", "num_cached_blocks"):
        count = getattr(stats, name)
        expect(
            0 <= count <= maximum,
            f"the statistics have {name}={count}; expected 0 to num_blocks={maximum}",
        )
    share = (
        used / maximum if maximum else stats.kv_cache_usage
    )  # 0: the scheduler does not count blocks
    expect(
        abs(share - stats.kv_cache_usage) < 1e-9,
        f"the statistics have kv_cache_usage={stats.kv_cache_usage}, but {used} of {maximum} "
        "blocks are in use",
    )
    for name in ("schedule_ns", "update_ns"):
        time = getattr(stats, name)
        expect(time >= 0, f"the statistics have {name}={time}; it must not be negative")

"""Checks the number of drafts in plans against the drafts that workers have returned.

This module uses plans and results. `SchedulerDriver` checks that drafts do not change tokens.
"""

from __future__ import annotations

from collections import Counter, deque

from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.expectation import expect


class DraftChecker:
    """Counts the drafts of one scheduler. num_verified: number of drafts verified so far."""

    def __init__(self, num_lookahead_tokens: int) -> None:
        self.num_verified = 0
        self._maximum = num_lookahead_tokens
        self._held: Counter[int] = Counter()  # number of drafts by row, after the row's last result
        self._in_flight: Counter[int] = Counter()  # number of sampling runs by row
        self._out: deque[dict[int, int]] = deque()

    def planned(self, plan: SchedulerOutput) -> None:
        """Check a new plan against the results so far."""
        for row in (*plan.leaves, *(request.row for request in plan.joins)):
            self._held[row] = self._in_flight[row] = 0
            for runs in self._out:
                runs.pop(row, None)
        for run, row in enumerate(plan.rows):
            num_drafts = plan.num_drafts[run] if plan.num_drafts else 0
            maximum = self._maximum if self._in_flight[row] else self._held[row]
            expect(
                0 <= num_drafts <= maximum,
                f"the plan has num_drafts={num_drafts} for row {row}; the limit is {maximum}",
            )
        drafts = plan.num_drafts or bytes(len(plan.rows))
        columns = zip(plan.rows, drafts, plan.samples, strict=True)
        self._out.append({row: num for row, num, samples in columns if samples})
        self._in_flight.update(self._out[-1].keys())

    def settled(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Record the drafts in the result of the oldest plan."""
        runs = self._out.popleft()
        for run, row in enumerate(plan.rows):
            if row in runs:
                self._in_flight[row] -= 1
                self.num_verified += min(runs[row], self._held[row])
                self._held[row] = result.num_drafts[run] if result.num_drafts else 0

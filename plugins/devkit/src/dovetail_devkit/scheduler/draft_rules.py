"""What a scheduler may ask of drafts: it may verify what it has been told of, and nothing else.

Knows plans and results. That drafts change no token is the business of whoever looks at tokens.
"""

from __future__ import annotations

from dovetail.plan import SchedulerOutput
from dovetail.result import ModelRunnerOutput
from dovetail_devkit.expectation import expect


class DraftChecker:
    """Accounts of one scheduler's drafts. num_verified: how many it has had verified so far."""

    def __init__(self) -> None:
        self.num_verified = 0
        self._told: dict[int, int] = {}
        self._verifying: dict[int, int] = {}
        self._last_run: dict[int, int] = {}

    def planned(self, plan: SchedulerOutput) -> None:
        """Hold a new plan against what the results so far have told."""
        for row in (*plan.leaves, *(request.row for request in plan.joins)):
            self._told.pop(row, None)
            self._verifying.pop(row, None)
        for run, row in enumerate(plan.rows):
            known = self._told.pop(row, 0)
            self._last_run[row] = plan.step_id
            num_drafts = plan.num_drafts[run] if plan.num_drafts else 0
            expect(
                row not in self._verifying,
                f"row {row} runs, though its run in step {self._verifying.get(row)} verifies "
                "drafts, and nobody knows yet how many were right",
            )
            expect(
                0 <= num_drafts <= known,
                f"row {row} is to verify {num_drafts} drafts; the results so far tell of {known}",
            )
            if num_drafts:
                self.num_verified += num_drafts
                self._verifying[row] = plan.step_id

    def settled(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Take in what the scheduler has been told of `plan`'s drafts."""
        for run, row in enumerate(plan.rows):
            if self._verifying.get(row) == plan.step_id:
                del self._verifying[row]
            if result.num_drafts and self._last_run[row] == plan.step_id:
                self._told[row] = result.num_drafts[run]

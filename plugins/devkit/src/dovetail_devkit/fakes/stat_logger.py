"""A fake stat logger that stores all statistics."""

from __future__ import annotations

from dovetail.interfaces.stat_logger import StatLogger, StatLoggerContext, StepStats
from dovetail_devkit.expectation import expect


class FakeStatLogger(StatLogger):
    """Stores all statistics.

    steps: the statistics of each step.
    num_closed: number of calls of `close`.
    """

    def __init__(self, context: StatLoggerContext) -> None:
        self.context = context
        self.steps: list[StepStats] = []
        self.num_closed = 0

    def record(self, step: StepStats) -> None:
        """Store the statistics. Raise AssertionError after `close`."""
        expect(not self.num_closed, "record() was called after close()")
        self.steps.append(step)

    def close(self) -> None:
        """Count this call of `close`."""
        self.num_closed += 1

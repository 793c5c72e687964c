"""Measured steps of a real engine: the work of each step, its duration, and the gap after it.

`StepRecorder` stores plans during a run, and computes their features after the run, so that
recording does not slow the measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dovetail.plan import SchedulerOutput
from dovetail_lab.simulation.previous_step import After, PreviousStep
from dovetail_lab.simulation.step_times import StepFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """One measured step.

    after: what ran in the step before it. duration_ns: from the plan to the result. gap_ns: the
    host's time from the result to the next action of the run loop.
    """

    features: StepFeatures
    duration_ns: int
    gap_ns: int
    after: After = After.SAME


class StepRecorder:
    """Stores the steps of one real run."""

    def __init__(self) -> None:
        self._plans: list[SchedulerOutput] = []
        self._durations: list[int] = []
        self._gaps: list[int] = []
        self._end_ns = -1

    def end_step(self, plan: SchedulerOutput, start_ns: int, end_ns: int) -> None:
        """Store a step. Steps without tokens are ignored."""
        if plan.rows:
            self._plans.append(plan)
            self._durations.append(end_ns - start_ns)
            self._gaps.append(0)
            self._end_ns = end_ns

    def resume(self, now_ns: int) -> None:
        """Store when the run loop continues after a step."""
        if self._end_ns >= 0:
            self._gaps[-1] = now_ns - self._end_ns
            self._end_ns = -1

    def samples(self) -> Sequence[StepSample]:
        """Return the steps, in order."""
        previous = PreviousStep()
        return [
            StepSample(
                features=StepFeatures.of(plan),
                duration_ns=duration,
                gap_ns=gap,
                after=previous.run(plan),
            )
            for plan, duration, gap in zip(self._plans, self._durations, self._gaps, strict=True)
        ]

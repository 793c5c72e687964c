"""Drafts: tokens that a worker guesses, and that a later run verifies.

The scheduler never sees a draft; it counts. While a worker holds drafts for a row, they count as
tokens on their way (`Request.num_tokens_with_pending`), so that budget and blocks are granted for
them like for any other token. What a run that samples leaves behind is unknown until its result is
in, so nothing more of its request is planned until then; the others go on.

Used in place of the plain draft and step result only where `num_lookahead_tokens` is set.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from dovetail.plan import SchedulerOutput, StepBuilder
from dovetail.request import Request
from dovetail.result import ModelRunnerOutput
from dovetail.scheduling.draft import StepDraft


class VerifyingDraft(StepDraft):
    """A step in the making whose runs may reach beyond the known tokens, into drafts."""

    def _emit_runs(self, builder: StepBuilder) -> None:
        starts, samples, num_drafts = array("i"), array("B"), array("i")
        for request, count in self.counts.items():
            start, known = request.num_computed_tokens, request.num_tokens
            end = start + count
            starts.append(start)
            samples.append(end >= known)
            num_drafts.append(max(0, end - known))
            request.num_computed_tokens = end
            if end >= known:
                request.num_tokens_with_pending = end
        rows = [request.row for request in self.counts]
        drafts = num_drafts if any(num_drafts) else ()
        builder.run_many(rows, starts, self.counts.values(), samples, drafts)


class DraftCounts:
    """What became of the drafts. num_drafts, num_accepted: sums over the scheduler's life."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_accepted = 0

    def settle(
        self, requests: Sequence[Request], plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> None:
        """Bring requests to where the result of `plan` leaves them; tokens are appended already.

        requests: those of the plan's runs, in plan order; those that have ended before are left
        alone. Drafts that would make a request longer than it may be are not counted.
        """
        self.num_drafts += sum(plan.num_drafts)
        for run, num_sampled in enumerate(output.num_sampled):
            request = requests[run]
            if not num_sampled:
                continue
            self.num_accepted += num_sampled - 1
            if request.status.finished:
                continue
            known, num_held = request.num_tokens, 0
            if request.row >= 0:  # else it was preempted, and its drafts are gone
                request.num_computed_tokens = known - 1
                num_held = output.num_drafts[run] if output.num_drafts else 0
            room = max(0, request.max_total_tokens - known - 1)
            request.num_tokens_with_pending = known + min(num_held, room)

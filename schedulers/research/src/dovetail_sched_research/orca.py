"""Orca: batches are made again at every iteration, and prompts are never cut.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
OSDI 2022. First come, first served; a request is admitted only if there is memory for the longest
output that it may have, so that none is ever preempted.
"""

from __future__ import annotations

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView


class OrcaPolicy(Policy):
    """Admit whole prompts in the order of arrival, with all the blocks they may ever need."""

    work_conserving = False

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue all that run, then admit whole prompts until one is denied."""
        yield CONTINUE
        for request in view.waiting:
            grant = yield self._admission(request, whole=True)
            if not grant and not view.running:
                # No step takes it whole: in pieces, once it is alone, or it would never run.
                grant = yield self._admission(request, whole=False)
            if not grant:
                return

    def _admission(self, request: RequestView, *, whole: bool) -> Action:
        return Run(request, reserve=request.max_total_tokens, whole=whole)

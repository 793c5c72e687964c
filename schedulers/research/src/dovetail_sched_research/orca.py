"""Orca: a new batch is formed at every iteration, and prompts are never split.

Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
OSDI 2022. First come, first served. A request is admitted only if there are blocks for its longest
possible output, so no request is preempted.
"""

from __future__ import annotations

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, RequestView, Run, SchedulerView


class OrcaPolicy(Policy):
    """Admits whole prompts in the order of arrival. Reserves blocks for their longest output."""

    work_conserving = False

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue running requests, then admit whole prompts until one request is denied."""
        yield CONTINUE
        for request in view.waiting:
            grant = yield self._admission(request, whole=True)
            if not grant and not view.running:
                # The prompt exceeds the token budget of a step, so it runs alone and in chunks.
                grant = yield self._admission(request, whole=False)
            if not grant:
                return

    def _admission(self, request: RequestView, *, whole: bool) -> Action:
        return Run(request, reserve=request.max_total_tokens, whole=whole)

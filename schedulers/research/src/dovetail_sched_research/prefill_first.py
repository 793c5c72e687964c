"""Prefill first: a step is made of prompts or of decodes, and prompts go first.

The order of vLLM before version 1: Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", SOSP 2023, arXiv:2309.06180. First tokens come soon; decodes
stall behind them.
"""

from __future__ import annotations

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, Run, SchedulerView


class PrefillFirstPolicy(Policy):
    """Run whole prompts alone in a step as long as one fits, else all decodes."""

    work_conserving = False

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Admit whole prompts in the order of arrival; continue the rest if none was admitted."""
        waiting, num_running = view.waiting, len(view.running)
        for request in waiting:
            if not (yield Run(request, whole=True)):
                break
        if len(view.running) > num_running:
            return
        yield CONTINUE
        if waiting and not num_running:
            # No step takes it whole: in pieces, once it is alone, or it would never run.
            yield Run(waiting[0])

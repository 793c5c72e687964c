"""Prefill first: a step runs either prefills or decodes, and prefills go first.

The scheduling of vLLM before V1: Kwon et al., "Efficient Memory Management for Large Language
Model Serving with PagedAttention", SOSP 2023, arXiv:2309.06180. The time to first token is short,
but each arrival delays the decodes.
"""

from __future__ import annotations

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, Run, SchedulerView


class PrefillFirstPolicy(Policy):
    """Runs only whole prompts in a step if one fits, else all decodes."""

    work_conserving = False

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Admit whole prompts by arrival. Continue running requests if none was admitted."""
        waiting, num_running = view.waiting, len(view.running)
        for request in waiting:
            if not (yield Run(request, whole=True)):
                break
        if len(view.running) > num_running:
            return
        yield CONTINUE
        if waiting and not num_running:
            # The prompt exceeds the token budget of a step, so it runs alone and in chunks.
            yield Run(waiting[0])

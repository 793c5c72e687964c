"""Static batching: no request is added to a running batch.

This is how engines worked before continuous batching, and the baseline of Orca (Yu et al., OSDI
2022). The longest output of a batch keeps all its batch slots occupied.
"""

from __future__ import annotations

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, Run, SchedulerView


class StaticPolicy(Policy):
    """Admits a new batch when the previous one ends. Reserves blocks for the longest outputs."""

    work_conserving = False

    def __init__(self) -> None:
        self._is_open = False

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue the running batch. If there is none, admit requests in the order of arrival.

        A batch stays open while its requests wait for a prefix that another request computes.
        """
        if view.running:
            yield CONTINUE
            if not self._is_open:
                return
        self._is_open = False
        for request in view.waiting:
            grant = yield Run(request, reserve=request.max_total_tokens)
            if not grant:
                return
            self._is_open = self._is_open or not (grant.num_tokens or grant.num_cached)

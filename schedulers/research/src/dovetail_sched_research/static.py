"""Static batching: nobody joins a batch that runs.

How engines served before continuous batching, and the baseline that Orca (Yu et al., OSDI 2022)
was measured against. Does not depend on lengths: the longest output keeps all seats to itself.
"""

from __future__ import annotations

from collections.abc import Generator

from dovetail.interfaces import CONTINUE, Action, Grant, Policy, Run, SchedulerView


class StaticPolicy(Policy):
    """Fill the seats when the last batch is done; hold blocks for the longest output there is."""

    work_conserving = False

    def __init__(self) -> None:
        self._is_open = False

    def plan(self, view: SchedulerView) -> Generator[Action, Grant, None]:
        """Continue the batch; admit in the order of arrival if there is none.

        A batch stays open while requests of it wait for a prefix that another one computes.
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

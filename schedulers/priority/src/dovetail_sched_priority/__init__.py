"""Priority: the lowest number is served first. Equal numbers are served in the order of arrival.

A waiting request preempts running requests of lower priority when there are not enough free batch
slots or blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import Policy, RequestView, SchedulerView
from dovetail.scheduling import Scheduler

__all__ = ["PriorityPolicy", "PriorityScheduler"]


class PriorityPolicy(Policy):
    """Serves by (priority, arrival). Preempts the running request that is last in this order."""

    preempts = True

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int]:
        """Return (priority, position in arrival order)."""
        return request.priority, request.sequence

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the running request with the highest rank."""
        return max(running, key=lambda request: self.rank(request, view))


class PriorityScheduler(Scheduler):
    """The core scheduler with the priority policy."""

    policy_cls = PriorityPolicy

"""Priority: the lower number first, then the order of arrival.

A waiting request preempts running ones of a worse rank when seats or blocks are short, so that no
request waits for one that matters less.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces import Policy, RequestView, SchedulerView
from dovetail.scheduling import Scheduler

__all__ = ["PriorityPolicy", "PriorityScheduler"]


class PriorityPolicy(Policy):
    """Serve by (priority, arrival); the worst of those gives way."""

    preempts = True

    def rank(self, request: RequestView, view: SchedulerView) -> tuple[int, int]:
        """Return (priority, place in the order of arrival)."""
        return request.priority, request.sequence

    def victim(self, running: Sequence[RequestView], view: SchedulerView) -> RequestView:
        """Return the running request of the worst rank."""
        return max(running, key=lambda request: self.rank(request, view))


class PriorityScheduler(Scheduler):
    """The core scheduler with the priority policy."""

    policy_cls = PriorityPolicy

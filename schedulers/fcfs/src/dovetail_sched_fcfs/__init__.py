"""First come, first served: requests run in the order of arrival.

The last admitted request is preempted first. It keeps its position in the order of arrival and is
the first to be readmitted.
"""

from __future__ import annotations

from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler

__all__ = ["FCFSPolicy", "FCFSScheduler"]


class FCFSPolicy(Policy):
    """Serves requests in the order of arrival, as `Policy` does by default."""


class FCFSScheduler(Scheduler):
    """The core scheduler with the first come, first served policy."""

    policy_cls = FCFSPolicy

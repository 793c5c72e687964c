"""First come, first served: the order of arrival, and the last admitted gives way.

A preempted request keeps its place, so it is the first to come back.
"""

from __future__ import annotations

from dovetail.interfaces import Policy
from dovetail.scheduling import Scheduler

__all__ = ["FCFSPolicy", "FCFSScheduler"]


class FCFSPolicy(Policy):
    """Serve in the order of arrival: every default of `Policy`, by its name."""


class FCFSScheduler(Scheduler):
    """The core scheduler, first come, first served."""

    policy_cls = FCFSPolicy

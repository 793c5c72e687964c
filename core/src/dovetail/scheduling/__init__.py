"""Scheduling: the mechanism, the step in the making, the waiting queue and what results mean."""

from dovetail.scheduling.scheduler import Scheduler

__all__ = ["Scheduler"]

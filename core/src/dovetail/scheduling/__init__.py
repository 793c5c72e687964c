"""Scheduling: the mechanism, the step being planned, the waiting queue and what results mean."""

from dovetail.scheduling.scheduler import Scheduler

__all__ = ["Scheduler"]

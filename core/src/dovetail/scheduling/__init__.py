"""The scheduling mechanism, step planning, the waiting queue and step results."""

from dovetail.scheduling.scheduler import Scheduler

__all__ = ["Scheduler"]

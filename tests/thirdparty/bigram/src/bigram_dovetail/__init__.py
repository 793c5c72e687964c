"""Bigram models for Dovetail: a third-party platform, worker and scheduler in numpy.

This module depends only on the published contracts of the core, and not on torch.
"""

from bigram_dovetail.platform import BigramPlatform
from bigram_dovetail.scheduler import RoundRobinScheduler
from bigram_dovetail.worker import BigramWorker

__all__ = ["BigramPlatform", "BigramWorker", "RoundRobinScheduler"]

"""Bigram models for Dovetail, in numpy: a platform, a worker and a scheduler from outside.

Depends on the published contracts of the core only; does not need torch.
"""

from bigram_dovetail.platform import BigramPlatform
from bigram_dovetail.scheduler import RoundRobinScheduler
from bigram_dovetail.worker import BigramWorker

__all__ = ["BigramPlatform", "BigramWorker", "RoundRobinScheduler"]

"""One step of random requests for the backend on a simulated GPU.

Dimensions: H query heads, K key-value heads, D head size, B block size.
"""

from __future__ import annotations

import torch
from cpu_backends import BLOCK_SIZE, OnCpu

from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_devkit.attention import random_step

B, H, K, D = BLOCK_SIZE, random_step.RandomStep.num_heads, 2, 64
SPEC = FullAttentionSpec(block_size=B, num_kv_heads=K, head_size=D, dtype="bfloat16")
RUNS = ((2 * B, 1), (B, 1), (3, B + 2), (0, 5))
"""Numbers of context tokens and query tokens of each row."""
DECODES = ((2 * B, 1), (B - 1, 1), (0, 1))


class RandomStep(random_step.RandomStep):
    """Random requests, and a cache of shape [N, 2, B, K, D]."""

    def __init__(self, runs=RUNS, spec=SPEC):
        super().__init__(OnCpu, runs, spec, getattr(torch, spec.dtype))

    def write(self, index, blocks_T, offsets_T, x_TKD):
        self.cache[blocks_T, index, offsets_T] = x_TKD

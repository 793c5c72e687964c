"""Steps of random requests for the backend on a simulated GPU.

Dimensions: B block size, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

import torch
from cpu_backends import OnCpu
from reference_attention import calls

from dovetail.interfaces.kv_cache import FullAttentionSpec
from dovetail_devkit.attention.random_step import RandomStep

B, H, K, D = 16, RandomStep.num_heads, 2, 64
SPEC = FullAttentionSpec(block_size=B, num_kv_heads=K, head_size=D, dtype="bfloat16")
RUNS = ((2 * B, 1), (B, 1), (3, B + 2), (0, 5))  # (context, queries): decodes first


class Step(RandomStep):
    """Random requests, and a cache of shape [N, 2, K, B, D]."""

    def __init__(self, runs=RUNS, spec=SPEC):
        super().__init__(OnCpu, runs, spec, torch.bfloat16)

    def write(self, index, blocks_T, offsets_T, x_TKD):
        self.cache[blocks_T, index, :, offsets_T] = x_TKD


def attended(step, backend=OnCpu, **changes):
    """Run a step with one layer, check it, and return the names of the calls."""
    step.run(backend, **changes)
    return [name for name, _ in calls]

"""Starts the worker of the worker suite."""

from __future__ import annotations

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.interfaces.worker import ModelInfo, WorkerBase
from dovetail.kv_cache.grouping import group_layers
from dovetail_devkit.expectation import expect

NUM_ROWS = 4
NUM_TOKENS = 5
PROMPT_LENGTHS = (1, 5, 9, 14)
BLOCK_SIZE = 4
"""Block size for models without a KV cache, which have no KV-cache specs with a block size."""


def bring_up(worker: WorkerBase) -> tuple[ModelInfo, KVCacheConfig]:
    """Start a worker as an engine does, with a cache of a few blocks."""
    worker.init_device()
    worker.load_model()
    info = worker.get_model_info()
    specs = worker.get_kv_cache_spec()
    longest = max(PROMPT_LENGTHS) + 2 * NUM_TOKENS
    groups = group_layers([specs], block_size=BLOCK_SIZE, max_model_len=longest)
    num_blocks = 1 + (NUM_ROWS + 1) * len(groups) * -(-longest // BLOCK_SIZE)
    available = worker.determine_available_memory()
    kv_cache = KVCacheConfig(num_blocks=num_blocks, groups=groups)
    needed = num_blocks * kv_cache.bytes_per_block
    expect(
        isinstance(available, int) and available > 0,
        f"determine_available_memory returns {available!r}; expected a positive int",
    )
    expect(
        available >= needed,
        f"determine_available_memory returns {available} bytes, but the suite needs {needed}",
    )
    worker.initialize_cache(kv_cache)
    worker.compile_or_warm_up_model()
    return info, kv_cache

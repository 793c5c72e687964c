"""How many blocks a sequence takes, and how long a sequence a number of blocks can hold.

Pure arithmetic over the groups of a model. Depends on no pool.
"""

from __future__ import annotations

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.kv_cache.kinds import kind_of

MAX_TOKENS = 2**31 - 1


def sequence_blocks(config: KVCacheConfig, num_tokens: int, *, max_step_tokens: int = 0) -> int:
    """Return how many blocks one sequence of `num_tokens` holds at most at a time.

    max_step_tokens: tokens of a sequence in one step; 0 if that is not known: then no group is
    assumed to have given blocks back.
    """
    kinds = [kind_of(group.spec) for group in config.groups]
    return sum(kind.max_blocks(num_tokens, max_step_tokens) for kind in kinds)


def max_sequence_tokens(config: KVCacheConfig, *, max_step_tokens: int = 0) -> int:
    """Return how long one sequence can be if it has all blocks, at most 2**31 - 1 tokens.

    max_step_tokens: as for `sequence_blocks`.
    """
    usable, size = config.num_blocks - 1, config.block_size

    def fits(num_units: int) -> bool:
        needed = sequence_blocks(config, num_units * size, max_step_tokens=max_step_tokens)
        return needed <= usable

    low, high = 0, MAX_TOKENS // size + 1  # fits(low) is true, or nothing fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * size

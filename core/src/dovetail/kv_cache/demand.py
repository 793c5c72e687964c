"""Computes the blocks that a sequence needs, and the longest sequence for a number of blocks."""

from __future__ import annotations

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.kv_cache.kinds import kind_of

MAX_TOKENS = 2**31 - 1


def sequence_blocks(config: KVCacheConfig, num_tokens: int, *, max_step_tokens: int = 0) -> int:
    """Return the maximum number of blocks that one sequence of `num_tokens` holds at a time.

    max_step_tokens: maximum tokens of a sequence per step; 0 if unknown. With 0, no group is
    assumed to free blocks of a running sequence.
    """
    kinds = [kind_of(group.spec) for group in config.groups]
    return sum(kind.max_blocks(num_tokens, max_step_tokens) for kind in kinds)


def max_sequence_tokens(config: KVCacheConfig, *, max_step_tokens: int = 0) -> int:
    """Return the maximum length of a sequence that uses all blocks, at most 2**31 - 1 tokens.

    max_step_tokens: as for `sequence_blocks`.
    """
    usable, size = config.num_blocks - 1, config.block_size

    def fits(num_units: int) -> bool:
        needed = sequence_blocks(config, num_units * size, max_step_tokens=max_step_tokens)
        return needed <= usable

    low, high = 0, MAX_TOKENS // size + 1  # fits(low) is true unless no length fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * size

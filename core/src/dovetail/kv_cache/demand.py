"""How many blocks a sequence takes, and how long a sequence that many blocks hold.

Pure arithmetic over the groups of a model. Knows no pool and no bytes.
"""

from __future__ import annotations

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.kv_cache.kinds import CacheKind, kind_of

MAX_TOKENS = 2**31 - 1


def sequence_blocks(config: KVCacheConfig, num_tokens: int, *, max_step_tokens: int = 0) -> int:
    """Return the blocks that one sequence of `num_tokens` holds at most at a time.

    max_step_tokens: tokens of a sequence in one step; 0 for unknown: then no group is counted on to
    have given anything back.
    """
    num_positions = -(-num_tokens // config.block_size)
    kinds = [kind_of(group.spec) for group in config.groups]
    size = config.block_size
    return sum(_at_once(kind, num_positions, size, max_step_tokens) for kind in kinds)


def max_sequence_tokens(config: KVCacheConfig, *, max_step_tokens: int = 0) -> int:
    """Return how long one sequence can be if it has all blocks, at most 2**31 - 1 tokens.

    max_step_tokens: as for `sequence_blocks`.
    """
    usable, size = config.num_blocks - 1, config.block_size

    def fits(num_positions: int) -> bool:
        asked = sequence_blocks(config, num_positions * size, max_step_tokens=max_step_tokens)
        return asked <= usable

    low, high = 0, MAX_TOKENS // size + 1  # fits(low) holds, or nothing fits; beyond `high` nobody
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * size


def _at_once(kind: CacheKind, num_positions: int, size: int, max_step_tokens: int) -> int:
    if not kind.positional:
        return 1
    if not kind.sheds or not max_step_tokens:
        return num_positions
    # The oldest token still seen and the last of the step may stand anywhere in their blocks.
    return min(num_positions, -(-(kind.span - 1 + max_step_tokens) // size) + 1)

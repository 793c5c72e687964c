"""A rank's shard of one dimension of a model, and how dimensions are sharded.

This module does not depend on tensors or layers, only on numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.errors import ConfigError
from dovetail.interfaces.model import RankGroup

_MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Entries start .. start + size - 1 of a dimension of `whole` entries."""

    start: int
    size: int
    whole: int

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole dimension."""
        return self.size == self.whole

    @property
    def slice(self) -> slice:
        """The shard as an index into the whole dimension."""
        return slice(self.start, self.start + self.size)


def unsharded(size: int) -> Shard:
    """Return a shard that is the whole dimension."""
    return Shard(start=0, size=size, whole=size)


def shard_evenly(size: int, ranks: RankGroup, owner: str) -> Shard:
    """Return the rank's shard of a dimension that is sharded evenly.

    owner: description of the dimension, such as "the 64 output features of a.b". Raises ConfigError
    if the shards would not be equal.
    """
    if size % ranks.size:
        raise cannot_shard(owner, ranks, lambda count: size % count == 0)
    share = size // ranks.size
    return Shard(start=ranks.rank * share, size=share, whole=size)


def shard_unevenly(size: int, ranks: RankGroup, owner: str) -> Shard:
    """Return the rank's shard of a dimension. The last ranks may have smaller shards.

    owner: as in `shard_evenly`. Raises ConfigError if a rank would have an empty shard.
    """

    def is_enough(count: int) -> bool:
        return -(-size // count) * (count - 1) < size

    if not is_enough(ranks.size):
        raise cannot_shard(owner, ranks, is_enough)
    maximum = -(-size // ranks.size)
    start = ranks.rank * maximum
    return Shard(start=start, size=min(maximum, size - start), whole=size)


def cannot_shard(owner: str, ranks: RankGroup, works: Callable[[int], bool]) -> ConfigError:
    """Return an error that lists the valid numbers of ranks."""
    valid = ", ".join(str(count) for count in range(1, _MAX_RANKS + 1) if works(count))
    return ConfigError(
        f"tensor_parallel_size={ranks.size} is not possible: {owner} cannot be sharded evenly. "
        f"Use {valid}."
    )

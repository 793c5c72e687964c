"""A rank's part of one dimension of a model, and who gets which.

Knows numbers only: no tensor, no layer, no rank but the number of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dovetail.errors import ConfigError
from dovetail.interfaces.model import RankGroup

_MOST_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Entries start .. start + size - 1 of a dimension that has `whole` of them in all."""

    start: int
    size: int
    whole: int

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left for other ranks."""
        return self.size == self.whole

    @property
    def slice(self) -> slice:
        """As an index of the whole dimension."""
        return slice(self.start, self.start + self.size)


def undivided(size: int) -> Shard:
    """Return all of a dimension."""
    return Shard(start=0, size=size, whole=size)


def divide(size: int, ranks: RankGroup, owner: str) -> Shard:
    """Return the rank's part where all have equal ones.

    owner: whose dimension it is, "the 64 output features of a.b". Raises ConfigError if the parts
    would not be equal.
    """
    if size % ranks.size:
        raise cannot_divide(owner, ranks, lambda count: size % count == 0)
    share = size // ranks.size
    return Shard(start=ranks.rank * share, size=share, whole=size)


def divide_unevenly(size: int, ranks: RankGroup, owner: str) -> Shard:
    """Return the rank's part where the last ranks may have less; the first has the most.

    owner: as in `divide`. Raises ConfigError if a rank would have nothing.
    """

    def is_enough(count: int) -> bool:
        return -(-size // count) * (count - 1) < size

    if not is_enough(ranks.size):
        raise cannot_divide(owner, ranks, is_enough)
    most = -(-size // ranks.size)
    start = ranks.rank * most
    return Shard(start=start, size=min(most, size - start), whole=size)


def cannot_divide(owner: str, ranks: RankGroup, works: Callable[[int], bool]) -> ConfigError:
    """Return the refusal, which names the numbers of ranks that would do."""
    good = ", ".join(str(count) for count in range(1, _MOST_RANKS + 1) if works(count))
    return ConfigError(
        f"tensor_parallel_size={ranks.size} is asked, but {owner} cannot be divided among so "
        f"many; it can among {good}: give one of these."
    )

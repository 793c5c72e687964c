"""The longest prefix that all groups of a model can resume, from what each has cached.

Pure search over keys: it is told how blocks are found, and knows no pool and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.kinds import CacheKind

Find = Callable[[Sequence[bytes], bytes], list[int]]
"""(hashes, suffix) to the block of each hash followed by the suffix, 0 where there is none."""

Has = Callable[[Sequence[bytes]], Sequence[bool]]
"""Says for each key whether its content is to be had elsewhere."""

_ELSEWHERE = -1


class Coordinator:
    """Knows the kinds of a model's groups.

    kinds: one a group. growing: the groups whose tables have a block for each `block_size` tokens.
    can_resume: whether a prefix can be found at all; not where a state is kept once.
    suffixes: one for each of those; makes a block's key of a hash, so that no two groups share one.
    """

    def __init__(self, kinds: Sequence[CacheKind], block_size: int) -> None:
        self.kinds = kinds
        self.growing = [group for group, kind in enumerate(kinds) if kind.positional]
        self.suffixes = [
            b"" if not group else group.to_bytes(2, "little") for group in self.growing
        ]
        self.nothing = Hit(0, [()] * len(kinds))
        self._block_size = block_size
        self.can_resume = len(self.growing) == len(kinds)

    def lookup(self, hashes: Sequence[bytes], find: Find, elsewhere: Has | None) -> Hit:
        """Return the longest prefix of the blocks `hashes` that every group can resume.

        A group's answer never passes over a prefix that it could resume, so the first length on
        which all agree is the longest.
        """
        if not self.can_resume:
            return self.nothing
        cached = [find(hashes, suffix) for suffix in self.suffixes]
        if elsewhere is not None:
            for suffix, blocks in zip(self.suffixes, cached, strict=True):
                _mark_elsewhere(hashes, suffix, blocks, elsewhere)
        agreed, before = len(hashes), -1
        while agreed != before:
            before = agreed
            for kind, blocks in zip(self.kinds, cached, strict=True):
                agreed = kind.resumable(blocks, agreed)
        return self._hit(cached, agreed)

    def _hit(self, cached: Sequence[list[int]], num_blocks: int) -> Hit:
        num_tokens = num_blocks * self._block_size
        tables, missing = [], []
        for group, (kind, blocks) in enumerate(zip(self.kinds, cached, strict=True)):
            start = kind.first_needed(num_tokens)
            table = [0] * start + blocks[start:num_blocks]
            for position in range(start, num_blocks):
                if table[position] == _ELSEWHERE:
                    table[position] = 0
                    missing.append((group, position))
            tables.append(table)
        return Hit(num_tokens, tables, tuple(missing))


def _mark_elsewhere(
    hashes: Sequence[bytes], suffix: bytes, blocks: list[int], elsewhere: Has
) -> None:
    absent = [position for position, block in enumerate(blocks) if not block]
    there = elsewhere([hashes[position] + suffix for position in absent])
    for position, is_there in zip(absent, there, strict=True):
        if is_there:
            blocks[position] = _ELSEWHERE

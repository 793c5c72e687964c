"""Finds the longest cached prefix that all KV-cache groups of a model can resume.

It searches keys with a look-up function, and does not depend on the pool or on requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.kinds import CacheKind

Find = Callable[[Sequence[bytes], bytes], list[int]]
"""Maps (hashes, suffix) to the block of each key (a hash followed by the suffix); 0 for none."""

Has = Callable[[Sequence[bytes]], Sequence[bool]]
"""Maps keys to whether the KV connector can load the block of each key."""

_ELSEWHERE = -1


class Coordinator:
    """Searches the cached blocks of all groups of a model.

    kinds: the rules of each group. growing: the indices of groups whose block tables grow with the
    sequence. ratios: hashes per block of each growing group. suffixes: one per growing group; a
    hash with the suffix is the key of a block, so that groups have different keys.
    can_resume: whether prefixes can be resumed; False if a group keeps a state without snapshots.
    """

    def __init__(self, kinds: Sequence[CacheKind], block_size: int) -> None:
        """Prepare the search. block_size: tokens per hash. Divides the block size of each group."""
        self.kinds = kinds
        self.growing = [group for group, kind in enumerate(kinds) if kind.positional]
        self.ratios = [kinds[group].block_size // block_size for group in self.growing]
        self.suffixes = [
            _suffix(group, ratio) for group, ratio in zip(self.growing, self.ratios, strict=True)
        ]
        self.nothing = Hit(0, [()] * len(kinds))
        self._block_size = block_size
        self.can_resume = len(self.growing) == len(kinds)

    def named(self, hashes: Sequence[bytes], group: int, start: int, end: int) -> Sequence[bytes]:
        """Return the keys, without suffix, of a growing group's blocks in hashes [start, end).

        A block may span several hashes. Its key is the last of them.
        """
        ratio = self.ratios[group]
        return hashes[start // ratio * ratio + ratio - 1 : end : ratio]

    def lookup(self, hashes: Sequence[bytes], find: Find, elsewhere: Has | None) -> Hit:
        """Return the longest prefix of the tokens of `hashes` that every group can resume.

        Each group returns the longest prefix that it can resume, up to a limit. The limit is
        lowered until all groups return the same length.
        """
        if not self.can_resume:
            return self.nothing
        cached = []
        for group, suffix in enumerate(self.suffixes):
            keys = self.named(hashes, group, 0, len(hashes))
            blocks = find(keys, suffix)
            if elsewhere is not None:
                _mark_elsewhere(keys, suffix, blocks, elsewhere)
            cached.append(blocks)
        agreed, before = len(hashes) * self._block_size, -1
        while agreed != before:
            before = agreed
            for kind, blocks in zip(self.kinds, cached, strict=True):
                agreed = kind.resumable(blocks, agreed // kind.block_size) * kind.block_size
        return self._hit(cached, agreed)

    def _hit(self, cached: Sequence[list[int]], num_tokens: int) -> Hit:
        tables, missing = [], []
        for group, (kind, blocks) in enumerate(zip(self.kinds, cached, strict=True)):
            start, end = kind.first_needed(num_tokens), num_tokens // kind.block_size
            table = [0] * start + blocks[start:end]
            for position in range(start, end):
                if table[position] == _ELSEWHERE:
                    table[position] = 0
                    missing.append((group, position))
            tables.append(table)
        return Hit(num_tokens, tables, tuple(missing))


def _suffix(group: int, ratio: int) -> bytes:
    if not group and ratio == 1:
        return b""
    size = ratio.to_bytes(4, "little") if ratio > 1 else b""
    return group.to_bytes(2, "little") + size


def _mark_elsewhere(
    hashes: Sequence[bytes], suffix: bytes, blocks: list[int], elsewhere: Has
) -> None:
    absent = [position for position, block in enumerate(blocks) if not block]
    there = elsewhere([hashes[position] + suffix for position in absent])
    for position, is_there in zip(absent, there, strict=True):
        if is_there:
            blocks[position] = _ELSEWHERE

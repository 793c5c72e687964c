"""The pool of KV blocks: reference counts, the free queue, and the index of cached blocks.

Integer bookkeeping only: the pool knows neither requests nor tensors. A block is in use (reference
count ≥ 1) or in the free queue. A free block may still be cached: it keeps its content and its
place in the index until it is handed out again, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 1 .. num_blocks - 1. Block 0 is nobody's: padding may be written to it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block 0 is reserved")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Blocks that could be handed out now, cached ones among them."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`; changes nothing."""
        found = []
        for key in hashes:
            block = self._index.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def each(self, hashes: Iterable[bytes], suffix: bytes) -> list[int]:
        """Return the block of each hash followed by `suffix`, 0 where there is none."""
        get = self._index.get
        return [get(key + suffix, 0) for key in hashes]

    def ref_count(self, block: int) -> int:
        """Return how many references `block` has."""
        return self._ref_counts[block]

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` are in the free queue: taking them uses up free blocks."""
        return sum(block in self._free for block in blocks)

    def take(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`: found just now, or in use already."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._free[block]
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, the longest unused first; raise LookupError if too few."""
        if count > len(self._free):
            raise LookupError(f"{count} blocks are asked, {len(self._free)} are free")
        pop, hashes, ref_counts = self._free.popitem, self._hashes, self._ref_counts
        blocks = []
        for _ in range(count):
            block, _none = pop(last=False)
            key = hashes[block]
            if key is not None:
                del self._index[key]
                hashes[block] = None
                self.num_evictions += 1
            ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def commit(self, block: int, key: bytes) -> None:
        """Let a full block in use be found by `key`, unless another one already can."""
        if key not in self._index and self._hashes[block] is None:
            self._index[key] = block
            self._hashes[block] = key

    def free(self, blocks: Sequence[int]) -> None:
        """Take one reference from each of `blocks`, given in the order of their tokens.

        Later blocks are evicted before earlier ones, since they are of use to fewer requests.
        """
        ref_counts = self._ref_counts
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            if count < 0:
                raise ValueError(f"block {block} is freed twice")
            ref_counts[block] = count
            if not count:
                self._free[block] = None

    def reset_cache(self) -> bool:
        """Forget every cached block; return False, changing nothing, if any block is in use."""
        if len(self._free) != self.num_blocks - 1:
            return False
        for block in self._index.values():
            self._hashes[block] = None
        self._index.clear()
        return True

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless `held`, one entry a reference, is all that is in use."""
        counts = [0] * self.num_blocks
        for block in held:
            counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from what requests hold"
        free = {block for block in range(1, self.num_blocks) if not counts[block]}
        assert free == set(self._free), "the free queue is not the set of unused blocks"
        assert counts[0] == 0, "block 0 is in use"
        for key, block in self._index.items():
            assert self._hashes[block] == key, f"block {block} is indexed under a foreign hash"
        assert len(self._index) == sum(key is not None for key in self._hashes)

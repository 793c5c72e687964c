"""The pool of KV blocks: reference counts, the free queue, and the index of cached blocks.

The pool manages block ids only, no requests or tensors. A block is in use (reference count ≥ 1) or
free. A free block may be cached: it keeps its content and its index entry until it is allocated.
Blocks without content are allocated first: first blocks that were used before, then blocks that
were never used, so that the pool touches new memory as late as possible. If there are none, cached
blocks are evicted in LRU order. The pool has no entries for blocks that were never used.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Manages the blocks 1 to num_blocks - 1. Block 0 is reserved: padding may be written to it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"num_blocks={num_blocks} must be at least 2, because block 0 is reserved"
            )
        self.num_blocks = num_blocks
        # Only blocks that were used at least once have entries.
        self._ref_counts = [0]
        self._hashes: list[bytes | None] = [None]
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._blank: list[int] = []
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Number of free blocks, including cached ones."""
        return self.num_free_without_content + len(self._cached)

    @property
    def num_free_without_content(self) -> int:
        """Number of free blocks that can be allocated without evicting a cached block."""
        return self.num_blocks - len(self._ref_counts) + len(self._blank)

    @property
    def num_cached(self) -> int:
        """Number of blocks in the index."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of `hashes`. Changes nothing."""
        blocks = []
        for key in hashes:
            block = self._index.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_leading(self, hashes: Sequence[bytes], limit: int) -> int:
        """Return how many of the first `limit` hashes are cached, assuming no gap between them."""
        index = self._index
        return bisect_left(range(limit), True, key=lambda position: hashes[position] not in index)

    def each(self, hashes: Iterable[bytes], suffix: bytes) -> list[int]:
        """Return the block of each key (a hash followed by `suffix`), or 0 for an unknown key."""
        get = self._index.get
        return [get(key + suffix, 0) for key in hashes]

    def ref_count(self, block: int) -> int:
        """Return the reference count of `block`."""
        return self._ref_counts[block] if block < len(self._ref_counts) else 0

    def num_free_among(self, blocks: Iterable[int]) -> int:
        """Return how many of the cached `blocks` are free. `take` reduces `num_free` by this."""
        return sum(block in self._cached for block in blocks)

    def take(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of `blocks`, which are in use or were returned by `find`."""
        for block in blocks:
            if not self._ref_counts[block]:
                del self._cached[block]
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks, those without content first. Raise LookupError if too few."""
        if count > self.num_free:
            raise LookupError(f"{count} blocks are requested, but only {self.num_free} are free")
        if not count:
            return []
        blank, ref_counts = self._blank, self._ref_counts
        blocks = blank[: -count - 1 : -1]
        if blocks:
            del blank[-count:]
            for block in blocks:
                ref_counts[block] = 1
        if len(blocks) < count:
            blocks += self._take_unused(count - len(blocks))
            while len(blocks) < count:
                block = self._evict()
                ref_counts[block] = 1
                blocks.append(block)
        return blocks

    def _take_unused(self, count: int) -> range:
        """Return at most `count` blocks that were never used, now with one reference each."""
        first = len(self._ref_counts)
        num_taken = min(count, self.num_blocks - first)
        self._ref_counts += [1] * num_taken
        self._hashes += [None] * num_taken
        return range(first, first + num_taken)

    def _evict(self) -> int:
        """Remove the least recently used block from the index and return it."""
        block, _ = self._cached.popitem(last=False)
        key = self._hashes[block]
        assert key is not None, "a cached free block has no hash"
        del self._index[key]
        self._hashes[block] = None
        self.num_evictions += 1
        return block

    def commit(self, block: int, key: bytes) -> None:
        """Add a full block in use to the index under `key`, unless `key` has a block."""
        if key not in self._index and self._hashes[block] is None:
            self._index[key] = block
            self._hashes[block] = key

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one reference from each of `blocks`, given in the order of their tokens.

        Later blocks are evicted before earlier ones, because fewer requests can use them.
        """
        ref_counts, hashes, cached = self._ref_counts, self._hashes, self._cached
        add_blank = self._blank.append
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            if not count:
                ref_counts[block] = 0
                if hashes[block] is None:
                    add_blank(block)
                else:
                    cached[block] = None
            elif count > 0:
                ref_counts[block] = count
            else:
                raise ValueError(f"block {block} is freed twice")

    def reset_cache(self) -> bool:
        """Clear the index. If any block is in use, change nothing and return False."""
        if self.num_free != self.num_blocks - 1:
            return False
        for block in self._index.values():
            self._hashes[block] = None
        self._blank.extend(reversed(self._cached))
        self._cached.clear()
        self._index.clear()
        return True

    def check_integrity(self, held: Iterable[int]) -> None:
        """Raise AssertionError unless `held` contains exactly the references to blocks in use."""
        known = len(self._ref_counts)
        counts = [0] * known
        for block in held:
            assert block < known, f"block {block} is in use, but was never allocated"
            counts[block] += 1
        assert counts == self._ref_counts, (
            "the reference counts differ from the blocks of the requests"
        )
        free = {block for block in range(1, len(counts)) if not counts[block]}
        assert len(free) == len(self._blank) + len(self._cached), (
            "a block is in the free lists twice"
        )
        assert free == {*self._blank, *self._cached}, (
            "the free lists differ from the blocks without references"
        )
        assert {self._hashes[block] for block in self._blank} <= {None}, (
            "a free block without content is in the index"
        )
        assert counts[0] == 0, "the reserved block 0 is in use"
        for key, block in self._index.items():
            assert self._hashes[block] == key, f"block {block} is in the index under a wrong hash"
        assert len(self._index) == sum(key is not None for key in self._hashes)

"""The KV cache manager assigns blocks to requests.

The scheduler accesses the block pool only through this class. The manager changes only these
attributes of a request: `blocks`, `capacity`, `block_hashes`, `num_committed_blocks` and
`num_dropped_blocks`. All KV-cache groups share the pool; a group may need all past tokens of a
request or some of them (`kinds`). This module uses no tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.kv_cache.block_pool import BlockPool
from dovetail.kv_cache.coordinator import Coordinator, Has
from dovetail.kv_cache.decode_growth import DecodeGrowth
from dovetail.kv_cache.demand import max_sequence_tokens
from dovetail.kv_cache.hashing import PrefixHasher
from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.integrity import check_tables
from dovetail.kv_cache.kinds import CacheKind, capacity, kind_of
from dovetail.kv_cache.retiring_blocks import RetiringBlocks
from dovetail.request import Request

_FIRST_HASHES = 64
"""Number of hashes to compute in the first round of a search; it doubles in each round."""


class KVCacheManager:
    """Allocates and frees blocks of requests, and finds cached prefixes.

    is_plain: whether there is one group, with full attention.
    max_step_tokens: maximum tokens of a request per step, if known. Groups with windows then hold
    only the window and one step, so longer requests can be accepted.
    prefix_queries, prefix_hits: tokens looked up at first admissions, and tokens found.
    """

    def __init__(
        self, config: KVCacheConfig, *, enable_prefix_caching: bool, max_step_tokens: int = 0
    ) -> None:
        self.block_size = config.block_size
        self.num_blocks = config.num_blocks
        self.max_tokens = max_sequence_tokens(config, max_step_tokens=max_step_tokens)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._caching = enable_prefix_caching
        self._pool = BlockPool(config.num_blocks)
        self._kinds = [kind_of(group.spec) for group in config.groups]
        self._coordinator = Coordinator(self._kinds, self.block_size)
        self._shedding = [(g, kind) for g, kind in enumerate(self._kinds) if kind.sheds]
        self.is_plain = self._kinds == [CacheKind(self.block_size)]
        self._hasher = PrefixHasher(self.block_size)
        self._retiring = RetiringBlocks(self._pool)
        self._loading: dict[str, int] = {}
        self._pinned: list[int] = []
        self._growth = DecodeGrowth(
            self._pool,
            self.block_size,
            caching=enable_prefix_caching,
            loading=self._loading,
            commit=self.commit,
        )

    @property
    def num_free_blocks(self) -> int:
        """Number of free blocks."""
        return self._pool.num_free

    @property
    def num_due(self) -> int:
        """Number of block lists that the next steps will free."""
        return self._retiring.num_due

    @property
    def num_cached(self) -> int:
        """Number of blocks in the prefix cache."""
        return self._pool.num_cached

    @property
    def num_evictions(self) -> int:
        """Number of cached blocks that were reused for other tokens."""
        return self._pool.num_evictions

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return self._pool.usage

    def lookup(self, request: Request, elsewhere: Has | None = None) -> Hit:
        """Return the request's longest cached prefix.

        Does not change the pool. At least one token remains to be computed, because the step needs
        its logits. For requests with prompt log-probabilities the result is empty, because they
        need the logits of every position. elsewhere: a function that returns for each key whether
        its block can be loaded; loadable blocks count as cached.
        """
        if not self.shares(request):
            return self._coordinator.nothing
        num_blocks = (request.num_tokens - 1) // self.block_size
        self._hasher.extend(request, num_blocks)
        keys = request.block_hashes[:num_blocks]
        if self.is_plain and elsewhere is None:
            blocks = self._pool.find(keys)
            return Hit(len(blocks) * self.block_size, (blocks,))
        return self._coordinator.lookup(keys, self._pool.each, elsewhere)

    def prepare_lookup(self, request: Request, limit: int) -> int:
        """Compute at most `limit` of the hashes for a look-up. Return the number computed.

        If the result is less than `limit`, all hashes are available.
        """
        if not self.shares(request):
            return 0
        return self._hasher.extend(request, (request.num_tokens - 1) // self.block_size, limit)

    def find_cached(self, request: Request, limit: int) -> tuple[int, int]:
        """Return the number of cached tokens of a request, and the number of hashes computed.

        Policies may call this method for every waiting request in every step. So it computes at
        most `limit` hashes, and only while the prefix is cached; later tokens count as not cached.
        With one group it uses binary search, which assumes that a block is cached only if all
        earlier ones are. This is mostly true, because later blocks are evicted first.
        """
        if not self.shares(request):
            return 0, 0
        total, num_hashed = (request.num_tokens - 1) // self.block_size, 0
        keys = request.block_hashes
        while len(keys) < total and num_hashed < limit:
            if keys and not self._pool.find(keys[-1:]):
                break
            num_hashes = min(total, max(_FIRST_HASHES, 2 * len(keys)))
            num_hashed += self._hasher.extend(request, num_hashes, limit - num_hashed)
        total = min(total, len(keys))
        if not self.is_plain:
            hit = self._coordinator.lookup(keys[:total], self._pool.each, None)
            return hit.num_tokens, num_hashed
        return self._pool.num_leading(keys, total) * self.block_size, num_hashed

    def shares(self, request: Request) -> bool:
        """Return whether the request may use blocks that other requests have computed."""
        return self._caching and self._coordinator.can_resume and not request.needs_all_states

    def block_key(self, request: Request, position: int) -> bytes:
        """Return the hash of the block at a table position, or b"" if a token of it is unknown.

        Returns b"" for all positions if prefix caching is off.
        """
        if not self._caching or (position + 1) * self.block_size > request.num_tokens:
            return b""
        self._hasher.extend(request, position + 1)
        return request.block_hashes[position]

    def admit(self, request: Request, hit: Hit, num_tokens: int, *, reserve: int = 0) -> bool:
        """Assign the blocks of `hit` and new blocks for `num_tokens` tokens to a new request.

        hit: the result of `lookup` immediately before. reserve: tokens to allocate blocks for, if
        more than `num_tokens`; ignored for models that free blocks of running requests. Returns
        False, changing nothing, if too few blocks are free. New blocks replace the missing blocks
        of the hit, and no block is committed before `loaded` is called.
        """
        held = [block for blocks in hit.blocks for block in blocks if block]
        target, num_new = self._demand(hit, num_tokens, reserve)
        pool = self._pool
        if sum(num_new) + len(hit.missing) + pool.num_free_among(held) > pool.num_free:
            return False
        pool.take(held)
        num_hit = hit.num_tokens // self.block_size
        request.blocks = [
            [*blocks, *pool.allocate(count)]
            for blocks, count in zip(hit.blocks, num_new, strict=True)
        ]
        for group, position in hit.missing:
            request.blocks[group][position] = pool.allocate(1)[0]
        if hit.missing:
            self._loading[request.request_id] = num_hit
            num_hit = min(
                position * self._kinds[group].block_size for group, position in hit.missing
            )
            num_hit //= self.block_size
        request.capacity = capacity(request.blocks, self._kinds, target)
        request.num_committed_blocks = num_hit
        request.num_dropped_blocks = [kind.first_needed(hit.num_tokens) for kind in self._kinds]
        if self._caching and not request.num_preemptions:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += hit.num_tokens
        return True

    def fits(
        self,
        request: Request,
        hit: Hit,
        num_tokens: int,
        *,
        leaving: Sequence[Request] = (),
        reserve: int = 0,
    ) -> bool:
        """Return whether `admit` would succeed after the requests in `leaving` free their blocks.

        Blocks in `hit` or shared with other requests do not count as freed. Changes nothing.
        """
        _, num_new = self._demand(hit, num_tokens, reserve)
        held = [block for blocks in hit.blocks for block in blocks if block]
        releases = Counter(block for other in leaving for row in other.blocks for block in row)
        pool = self._pool
        freed = {block for block, count in releases.items() if pool.ref_count(block) == count}
        taken = pool.num_free_among(held) + sum(block in freed for block in held)
        return sum(num_new) + len(hit.missing) + taken <= pool.num_free + len(freed)

    def grow(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        """Allocate blocks so that a request holds `num_tokens`. Return them, one list per group.

        Returns None, changing nothing, if too few blocks are free. The values of the tokens need
        not be known, so drafts and pending tokens are included. Blocks that have left a window are
        freed first.
        """
        if num_tokens <= request.capacity:
            return [[] for _ in self._kinds]
        if self.is_plain:
            num_new = -(-(num_tokens - request.capacity) // self.block_size)
            if num_new > self._pool.num_free:
                return None
            blocks = self._pool.allocate(num_new)
            request.blocks[0] += blocks
            request.capacity += num_new * self.block_size
            return [blocks]
        return self._grow_groups(request, num_tokens)

    def next_blocks(self, requests: Sequence[Request]) -> tuple[list[Request], list[int]] | None:
        """Allocate a block for each request whose last block is full. Return requests and blocks.

        It does the same as `grow` and `commit`, but for many requests at once. Requests with spare
        blocks get no new block. Returns None, changing nothing, if too few blocks are free or the
        model has several groups; call `grow` in this case.
        """
        if not self.is_plain:
            return None
        return self._growth.next_blocks(requests)

    def grow_in_turn(self, requests: Sequence[Request], num_blocks: int) -> bool:
        """Allocate the blocks of consecutive steps: block i is for requests[i % len(requests)].

        The conditions are those of `DecodeGrowth.grow_in_turn`. Returns False, changing nothing,
        if `next_blocks` must be called in each step.
        """
        return self.is_plain and self._growth.grow_in_turn(requests, num_blocks)

    def commit(self, request: Request) -> None:
        """Add the request's full blocks of computed, known tokens to the prefix cache."""
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_committed_blocks or not self._caching:
            return
        if self._loading and request.request_id in self._loading:
            return
        self._hasher.extend(request, num_full)
        commit = self._pool.commit
        for block, key in self.named_blocks(request, request.num_committed_blocks, num_full):
            commit(block, key)
        request.num_committed_blocks = num_full

    def named_blocks(self, request: Request, start: int, end: int) -> list[tuple[int, bytes]]:
        """Return the blocks of all groups that end in the hashes [start, end), each with its key.

        The content of a block matches its key when the tokens are computed.
        """
        coordinator = self._coordinator
        named = []
        for index, group in enumerate(coordinator.growing):
            suffix, ratio = coordinator.suffixes[index], coordinator.ratios[index]
            keys = coordinator.named(request.block_hashes, index, start, end)
            blocks = request.blocks[group][start // ratio : end // ratio]
            named += [
                (block, key + suffix) for block, key in zip(blocks, keys, strict=True) if block
            ]
        return named

    def loaded(self, request: Request, failed: Sequence[int] = ()) -> bool:
        """Record that the blocks in a request's prefix hit were loaded, except those in `failed`.

        Commits the valid blocks and returns whether all are valid. If not, the caller must free the
        request, because its prefix is incomplete. The next look-up finds the valid blocks.
        """
        num_good = self._loading.pop(request.request_id)
        for table, kind in zip(request.blocks, self._kinds, strict=True):
            bad = (position for position, block in enumerate(table) if block in failed)
            position = next(bad, None)
            if position is not None:
                num_good = min(num_good, position * kind.block_size // self.block_size)
        for block, key in self.named_blocks(request, request.num_committed_blocks, num_good):
            self._pool.commit(block, key)
        request.num_committed_blocks = max(request.num_committed_blocks, num_good)
        return not failed

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep blocks in use until `unpin`, because a transfer reads or writes them."""
        self._pool.take(blocks)
        self._pinned += blocks

    def unpin(self, blocks: Sequence[int]) -> None:
        """Undo one `pin` of these blocks. Raise ValueError for a block that is not pinned."""
        for block in blocks:
            self._pinned.remove(block)
        self._pool.free(blocks)

    def advance(self, request: Request) -> None:
        """Free the blocks that no later token of the request needs. Their table entries become 0.

        They are reused immediately: plans execute in order, so a new owner writes to a block after
        its last reader. Drafts, which may be rejected, do not move a window.
        """
        if not self._shedding or not request.blocks:
            return
        self.commit(request)
        num_sure = min(request.num_computed_tokens, request.num_tokens)
        for group, kind in self._shedding:
            start, end = request.num_dropped_blocks[group], kind.first_needed(num_sure)
            if end > start:
                blocks = request.blocks[group]
                self._pool.free(blocks[start:end])
                blocks[start:end] = [0] * (end - start)
                request.num_dropped_blocks[group] = end

    def free(self, request: Request, *, last_step: int) -> None:
        """Free all blocks of a request after step `last_step` has been executed.

        A very large number of blocks is freed over several steps (`num_due`).
        last_step: the last plan that uses the blocks, or -1. Committed blocks stay in the prefix
        cache until they are evicted.
        """
        if self.is_plain and request.blocks:
            (blocks,) = request.blocks
        else:
            blocks = [
                block
                for table, start in zip(request.blocks, request.num_dropped_blocks, strict=True)
                for block in (table[start:] if start else table)
            ]
        if self._loading:
            self._loading.pop(request.request_id, None)
        request.blocks, request.num_dropped_blocks = [], []
        request.capacity = 0
        request.num_committed_blocks = 0
        self._retiring.add(blocks, last_step)

    def executed(self, step_id: int) -> None:
        """Record that all steps up to `step_id` have been executed."""
        self._retiring.executed(step_id)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. If blocks are in use, change nothing and return False."""
        return self._pool.reset_cache()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless the blocks in use are those of `requests`, with valid tables.

        requests: all requests that have blocks.
        """
        requests = list(requests)
        held = [block for request in requests for table in request.blocks for block in table]
        held += self._pinned
        held += self._retiring
        self._pool.check_integrity(block for block in held if block)
        self._retiring.check_integrity()
        for request in requests:
            num_hit = self._loading.get(request.request_id, 0)
            check_tables(request, self._kinds, self.block_size, num_hit)

    def _demand(self, hit: Hit, num_tokens: int, reserve: int) -> tuple[int, list[int]]:
        """Return the tokens to allocate at an admission, and the new blocks of each group."""
        target = max(hit.num_tokens, num_tokens if self._shedding else max(num_tokens, reserve))
        num_new = [
            kind.num_positions(target) - len(blocks)
            for kind, blocks in zip(self._kinds, hit.blocks, strict=True)
        ]
        return target, num_new

    def _grow_groups(self, request: Request, num_tokens: int) -> list[list[int]] | None:
        self.advance(request)
        num_new = [
            max(0, kind.num_positions(num_tokens) - len(table))
            for kind, table in zip(self._kinds, request.blocks, strict=True)
        ]
        if sum(num_new) > self._pool.num_free:
            return None
        grown = [self._pool.allocate(count) for count in num_new]
        for table, blocks in zip(request.blocks, grown, strict=True):
            table += blocks
        request.capacity = capacity(request.blocks, self._kinds, num_tokens)
        return grown

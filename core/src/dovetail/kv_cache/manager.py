"""The KV cache manager: which blocks hold which request's tokens.

The one door between the scheduler and the block pool. It writes to a request's `blocks`,
`capacity`, `block_hashes` and `num_committed_blocks`, and to nothing else of it. No tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.kv_cache.block_pool import BlockPool
from dovetail.kv_cache.hashing import block_hash, root_hash
from dovetail.request import Request


class KVCacheManager:
    """Gives blocks to requests, finds cached prefixes and takes blocks back."""

    def __init__(self, config: KVCacheConfig, *, enable_prefix_caching: bool) -> None:
        self.block_size = config.block_size
        self._caching = enable_prefix_caching
        self._pool = BlockPool(config.num_blocks)
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self._pool.usage

    @property
    def max_tokens(self) -> int:
        """Tokens that one request could hold if it were alone."""
        return (self._pool.num_blocks - 1) * self.block_size

    def lookup(self, request: Request) -> list[int]:
        """Return the cached blocks of the request's longest prefix; changes nothing of the pool.

        At least one token is always left to compute, since the step has to yield its logits.
        Prompt log-probabilities need every position computed, so nothing is found for them.
        """
        if not self._caching or request.sampling_params.prompt_logprobs is not None:
            return []
        num_blocks = (request.num_tokens - 1) // self.block_size
        self._extend_hashes(request, num_blocks)
        return self._pool.find(request.block_hashes[:num_blocks])

    def admit(self, request: Request, cached: Sequence[int], num_tokens: int) -> bool:
        """Give a request without blocks its `cached` ones and new ones up to `num_tokens` tokens.

        cached: what `lookup` has just returned. Returns False, changing nothing, if there are too
        few blocks.
        """
        num_new = -(-num_tokens // self.block_size) - len(cached)
        if num_new + self._pool.num_free_among(cached) > self._pool.num_free:
            return False
        self._pool.take_cached(cached)
        request.blocks = [[*cached, *self._pool.allocate(num_new)]]
        request.capacity = len(request.blocks[0]) * self.block_size
        request.num_committed_blocks = len(cached)
        if self._caching and not request.num_preemptions:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += len(cached) * self.block_size
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Give a request new blocks so that it holds `num_tokens`; return them, one group's.

        Returns None, changing nothing, if there are too few.
        """
        num_new = -(-(num_tokens - request.capacity) // self.block_size)
        if num_new > self._pool.num_free:
            return None
        blocks = self._pool.allocate(num_new)
        request.blocks[0] += blocks
        request.capacity += num_new * self.block_size
        return blocks

    def commit(self, request: Request) -> None:
        """Let the request's full blocks be found by others: those of its computed, known tokens."""
        if not self._caching:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_committed_blocks:
            return
        self._extend_hashes(request, num_full)
        for position in range(request.num_committed_blocks, num_full):
            self._pool.commit(request.blocks[0][position], request.block_hashes[position])
        request.num_committed_blocks = num_full

    def free(self, request: Request) -> None:
        """Take all blocks back. What was committed stays findable until it is evicted."""
        if request.blocks:
            self._pool.free(request.blocks[0])
        request.blocks = []
        request.capacity = 0
        request.num_committed_blocks = 0

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, changing nothing, if blocks are in use."""
        return self._pool.reset_cache()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError unless exactly the blocks of `requests` are in use."""
        requests = list(requests)
        held = [block for request in requests for blocks in request.blocks for block in blocks]
        self._pool.check_integrity(held)
        for request in requests:
            assert request.capacity == sum(map(len, request.blocks)) * self.block_size

    def _extend_hashes(self, request: Request, num_blocks: int) -> None:
        hashes = request.block_hashes
        if len(hashes) >= num_blocks:
            return
        parent = hashes[-1] if hashes else root_hash(request.cache_salt)
        for start in range(
            len(hashes) * self.block_size, num_blocks * self.block_size, self.block_size
        ):
            parent = block_hash(parent, request.token_ids[start : start + self.block_size])
            hashes.append(parent)

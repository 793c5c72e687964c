"""Allocates and commits the blocks of decoding requests, in one step or for many steps at once.

Only for models with one full-attention KV-cache group.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from dovetail.kv_cache.block_pool import BlockPool
from dovetail.kv_cache.hashing import block_hash, extend_hashes
from dovetail.request import Request


class DecodeGrowth:
    """Allocates blocks of decoding requests whose last block is full.

    loading: ids of the requests with a hit that is being loaded. commit: commits all full blocks of
    a request. caching: whether full blocks are committed.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        caching: bool,
        loading: Collection[str],
        commit: Callable[[Request], None],
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._caching = caching
        self._loading = loading
        self._commit = commit

    def next_blocks(self, requests: Sequence[Request]) -> tuple[list[Request], list[int]] | None:
        """Allocate a block for each request whose last block is full. Return requests and blocks.

        Requests with spare blocks get no new block. Returns None, changing nothing, if too few
        blocks are free.
        """
        growing = [item for item in requests if item.num_computed_tokens >= item.capacity]
        if len(growing) > self._pool.num_free:
            return None
        if self._caching:
            for request in requests:
                self._commit_next(request)
        blocks = self._pool.allocate(len(growing))
        for request, block in zip(growing, blocks, strict=True):
            request.blocks[0].append(block)
            request.capacity += self._block_size
        return growing, blocks

    def grow_in_turn(self, requests: Sequence[Request], num_blocks: int) -> bool:
        """Allocate the blocks of consecutive steps: block i is for requests[i % len(requests)].

        The result is the same as that of one call of `next_blocks` for each block. The last block
        of each request must become full before its first turn, no request may have a spare block,
        and all tokens of blocks that become full must be known. Returns False, changing nothing, if
        the result could differ because blocks are missing, or because of the prefix cache.
        """
        pool, size = self._pool, self._block_size
        if num_blocks > pool.num_free_without_content:
            return False
        num_turns = len(requests)
        if self._caching and not (num_turns == 1 and self._has_one_left(requests[0])):
            return False
        blocks = pool.allocate(num_blocks)
        for turn, request in enumerate(requests):
            own = blocks[turn::num_turns] if num_turns > 1 else blocks
            request.blocks[0] += own
            request.capacity += size * len(own)
        if self._caching:
            self._commit_all_but_last(requests[0])
        return True

    def _has_one_left(self, request: Request) -> bool:
        """Return whether all blocks of a request are committed except the last one."""
        num_committed = request.num_committed_blocks
        is_usual = len(request.block_hashes) == num_committed == len(request.blocks[0]) - 1 > 0
        return is_usual and not (request.encoder_inputs or self._loading)

    def _commit_all_but_last(self, request: Request) -> None:
        first, last = request.num_committed_blocks, len(request.blocks[0]) - 1
        extend_hashes(request, last, self._block_size)
        for position in range(first, last):
            self._pool.commit(request.blocks[0][position], request.block_hashes[position])
        request.num_committed_blocks = last

    def _commit_next(self, request: Request) -> None:
        """Commit the full blocks that are not committed yet. Usually this is one block."""
        index, hashes, size = request.num_committed_blocks, request.block_hashes, self._block_size
        start, end = index * size, index * size + size
        num_sure = min(request.num_computed_tokens, len(request.token_ids))
        is_usual = len(hashes) == index > 0 and end <= num_sure < end + size
        if not is_usual or request.encoder_inputs or self._loading:
            self._commit(request)
            return
        key = block_hash(hashes[-1], request.token_ids[start:end])
        hashes.append(key)
        self._pool.commit(request.blocks[0][index], key)
        request.num_committed_blocks = index + 1

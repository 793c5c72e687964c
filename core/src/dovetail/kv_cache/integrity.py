"""Checks, for tests, that a request's block tables match its tokens and its capacity."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.kv_cache.kinds import CacheKind, capacity
from dovetail.request import Request


def check_tables(
    request: Request, kinds: Sequence[CacheKind], block_size: int, num_hit: int
) -> None:
    """Raise AssertionError unless the request has exactly the blocks that it needs.

    block_size: tokens per hash. num_hit: number of hashes in a hit that is being loaded.
    """
    if not request.blocks:
        assert request.capacity == request.num_committed_blocks == 0
        return
    held = capacity(request.blocks, kinds, request.capacity)
    assert request.capacity == held, (
        f"the request has a capacity of {request.capacity} instead of {held} tokens"
    )
    num_committed = request.num_committed_blocks
    assert num_committed <= len(request.block_hashes), "a block was committed without a hash"
    num_sure = min(request.num_computed_tokens, request.num_tokens)
    num_sure = max(num_sure, max(num_committed, num_hit) * block_size)
    tables = zip(request.blocks, request.num_dropped_blocks, kinds, strict=True)
    for table, dropped, kind in tables:
        assert len(table) >= kind.num_positions(request.capacity)
        assert kind.positional or len(table) == 1
        assert not any(table[:dropped]), "the block table still contains a freed block"
        assert all(table[dropped:]), "the block table has no id for a block in use"
        assert dropped <= kind.first_needed(num_sure), (
            "a block was freed although the request needs it"
        )

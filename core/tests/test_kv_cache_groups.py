"""The KV-cache manager with groups of different kinds, and blocks that a plan in flight uses."""

from dataclasses import replace

import pytest

from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

SIZE = 4


def full(window=0):
    return FullAttentionSpec(
        block_size=SIZE, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window
    )


def chunked(size):
    return replace(full(), chunk_size=size)


STATE = StateSpec(block_size=SIZE, num_bytes=64)
SNAPSHOTS = StateSpec(block_size=SIZE, num_bytes=64, snapshots=True)


def manager(*specs, num_blocks=40, **options):
    groups = tuple(KVCacheGroup(layer_names=(f"l{i}",), spec=s) for i, s in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks + 1, groups=groups)
    return KVCacheManager(config, enable_prefix_caching=True, **options)


def request(tokens, name="r"):
    requested = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        sampling_params=SamplingParams(),
        max_tokens=64,
    )
    return Request(requested, max_model_len=256)


def admitted(cache, tokens, name="r"):
    new_request = request(tokens, name)
    assert cache.admit(new_request, cache.lookup(new_request), new_request.num_tokens)
    return new_request


def computed(cache, tokens, name="r"):
    new_request = admitted(cache, tokens, name)
    new_request.num_computed_tokens = new_request.num_tokens
    cache.commit(new_request)
    return new_request


def run_and_free(cache, tokens):
    """Compute a request with `tokens` and free it. Return its blocks."""
    new_request = computed(cache, tokens)
    blocks = [list(table) for table in new_request.blocks]
    cache.free(new_request, last_step=-1)
    return blocks


def test_groups_allocate_from_one_pool_and_never_share_a_block():
    cache = manager(full(), full(8))
    first_request = admitted(cache, range(9))
    first, second = first_request.blocks
    assert len(first) == len(second) == 3 and not set(first) & set(second)
    assert cache.num_free_blocks == 34
    grown = cache.grow(first_request, 13)
    assert grown == [first[3:], second[3:]] and all(map(len, grown))
    cache.check_integrity([first_request])
    cache.free(first_request, last_step=-1)
    assert cache.num_free_blocks == 40


def test_a_request_that_cannot_grow_in_all_groups_grows_in_none():
    cache = manager(full(), full(8), num_blocks=7)
    first = admitted(cache, range(9))
    assert cache.grow(first, 13) is None
    assert [len(table) for table in first.blocks] == [3, 3] and first.capacity == 12
    cache.check_integrity([first])


def test_freeing_blocks_outside_of_a_sliding_window_does_not_move_other_blocks():
    cache = manager(full(6))
    first = admitted(cache, range(16))
    blocks = list(first.blocks[0])
    first.num_computed_tokens = 13  # the next token attends to positions 8 to 13
    cache.advance(first)
    assert first.blocks == [[0, 0, *blocks[2:]]]
    assert cache.num_free_blocks == 38
    cache.advance(first)
    cache.check_integrity([first])
    assert cache.lookup(request(range(9))).num_tokens == 8  # the freed blocks are still cached


def test_the_blocks_of_a_chunk_are_freed_when_the_next_chunk_begins():
    cache = manager(full(), chunked(8))
    first, other = admitted(cache, range(16)), admitted(cache, range(100, 108), "other")
    blocks, others = list(first.blocks[1]), [list(table) for table in other.blocks]
    first.num_computed_tokens = 7  # the next token is the last one of chunk 0
    cache.advance(first)
    assert first.blocks[1] == blocks and cache.num_free_blocks == 28
    first.num_computed_tokens = 8
    cache.advance(first)
    assert first.blocks[1] == [0, 0, *blocks[2:]] and cache.num_free_blocks == 30
    assert [list(table) for table in other.blocks] == others  # another request of the batch
    cache.check_integrity([first, other])
    assert cache.lookup(request(range(9))).num_tokens == 8  # the freed blocks are still cached


def test_a_prefix_that_ends_at_a_chunk_boundary_needs_no_block_of_earlier_chunks():
    cache = manager(full(), chunked(8), num_blocks=12)
    run_and_free(cache, range(17))
    assert cache.lookup(request(range(17))).num_tokens == 16
    first = admitted(cache, range(17))
    assert first.num_dropped_blocks == [0, 4] and first.blocks[1][:4] == [0] * 4
    cache.check_integrity([first])


def test_blocks_for_one_chunk_and_one_step_are_enough_for_a_long_request():
    cache = manager(chunked(8), num_blocks=4, max_step_tokens=4)
    first = request(range(100))
    assert cache.max_tokens > 100
    assert cache.admit(first, cache.lookup(first), 4)
    for start in range(4, 100, 4):
        first.num_computed_tokens = start
        assert cache.grow(first, start + 4) is not None
        cache.check_integrity([first])


def test_sliding_window_blocks_are_not_freed_for_draft_tokens():
    cache = manager(full(2))
    first = admitted(cache, range(8))
    assert cache.grow(first, 16) is not None
    first.num_computed_tokens = 16  # includes 8 draft tokens
    cache.advance(first)
    assert first.num_dropped_blocks == [1]
    cache.check_integrity([first])


def test_an_allocation_first_frees_blocks_outside_of_the_window():
    cache = manager(full(4), num_blocks=3, max_step_tokens=4)
    first = request(range(100))
    assert cache.max_tokens > 100
    assert cache.admit(first, cache.lookup(first), 4)
    for start in range(4, 100, 4):
        first.num_computed_tokens = start
        assert cache.grow(first, start + 4) is not None
        cache.check_integrity([first])


def test_a_request_of_a_state_space_model_has_one_block_and_no_prefix_hits():
    cache = manager(STATE)
    first = computed(cache, range(30))
    assert [len(table) for table in first.blocks] == [1]
    assert cache.grow(first, 200) == [[]] and first.capacity == 200
    cache.check_integrity([first])
    assert cache.lookup(request(range(30))).num_tokens == 0
    cache.free(first, last_step=-1)
    assert cache.num_free_blocks == 40


def test_a_state_without_snapshots_prevents_all_prefix_hits():
    cache = manager(full(), STATE)
    run_and_free(cache, range(12))
    hit = cache.lookup(request(range(12)))
    assert hit.num_tokens == 0
    assert admitted(cache, range(12)).num_committed_blocks == 0


def test_state_snapshots_are_found_at_block_boundaries_only():
    cache = manager(SNAPSHOTS)
    first = admitted(cache, range(11))
    first.num_computed_tokens = 11
    cache.advance(first)
    assert first.num_dropped_blocks == [2]  # only the last block keeps the state
    cache.check_integrity([first])
    hit = cache.lookup(request([*range(10), 99, 98]))
    assert hit.num_tokens == 8
    # the hit has only the last state of the prefix
    assert hit.blocks[0][0] == 0 and hit.blocks[0][1]


def test_a_sliding_window_is_resumed_from_its_last_blocks_only():
    cache = manager(full(6))
    (blocks,) = run_and_free(cache, range(20))
    run_and_free(cache, range(100, 100 + 4 * 36))  # evicts all but the first blocks from the cache
    assert cache.lookup(request(range(20))).num_tokens == 16
    hit = cache.lookup(request(range(20)))
    assert hit.blocks[0][:2] == [0, 0] and list(hit.blocks[0][2:]) == blocks[2:4]


def test_the_common_prefix_is_the_longest_that_all_groups_can_resume():
    cache = manager(full(), full(4))
    first = computed(cache, range(16))
    tables = [list(table) for table in first.blocks]
    cache.free(first, last_step=-1)
    pool = cache._pool
    key = pool._hashes[tables[1][3]]
    del pool._index[key]  # evicts the last block of the window
    pool._hashes[tables[1][3]] = None
    hit = cache.lookup(request(range(17)))
    assert hit.num_tokens == 12
    assert list(hit.blocks[0]) == tables[0][:3]
    assert list(hit.blocks[1]) == [0, 0, tables[1][2]]


def test_blocks_are_freed_when_their_last_plan_has_been_executed():
    cache = manager(full(), num_blocks=4)
    first, second = admitted(cache, range(8)), admitted(cache, range(50, 58), "s")
    cache.free(first, last_step=5)
    cache.free(second, last_step=4)
    assert cache.num_free_blocks == 0 and first.blocks == []
    cache.check_integrity([])
    cache.executed(3)
    assert cache.num_free_blocks == 0
    cache.executed(4)
    assert cache.num_free_blocks == 2
    cache.check_integrity([])
    cache.executed(5)
    assert cache.num_free_blocks == 4
    third = admitted(cache, range(8), "t")
    cache.free(third, last_step=5)  # step 5 is already executed
    assert cache.num_free_blocks == 4
    assert cache.reset_prefix_cache()


def test_blocks_that_a_plan_in_flight_uses_can_be_found_and_prevent_a_cache_reset():
    cache = manager(full())
    first = computed(cache, range(8))
    cache.free(first, last_step=2)
    assert not cache.reset_prefix_cache()
    second = admitted(cache, range(9))
    assert second.num_committed_blocks == 2
    cache.executed(2)
    cache.check_integrity([second])


def test_reserved_blocks_are_allocated_at_admission():
    cache = manager(full(), num_blocks=6)
    first = request(range(5))
    assert not cache.admit(first, cache.lookup(first), 5, reserve=25)
    assert cache.admit(first, cache.lookup(first), 5, reserve=24)
    assert first.capacity == 24 and cache.num_free_blocks == 0


def test_no_blocks_are_reserved_if_a_sliding_window_frees_blocks():
    cache = manager(full(4), num_blocks=6)
    first = request(range(5))
    assert cache.admit(first, cache.lookup(first), 5, reserve=200)
    assert first.capacity == 8


@pytest.mark.parametrize(("num_tokens", "fits"), [(16, True), (17, False)])
def test_blocks_of_leaving_requests_count_as_free(num_tokens, fits):
    cache = manager(full(), num_blocks=4)
    first = admitted(cache, range(12))
    requested = request(range(50, 80), "s")
    hit = cache.lookup(requested)
    assert not cache.fits(requested, hit, 8)
    assert cache.fits(requested, hit, num_tokens, leaving=[first]) == fits
    assert cache.num_free_blocks == 1


def test_shared_blocks_are_freed_when_all_their_requests_have_left():
    cache = manager(full(), num_blocks=4)
    first = computed(cache, range(8))
    second = admitted(cache, [*range(8), 8, 9], "s")  # this request shares two blocks and owns one
    requested = request(range(50, 80), "t")
    hit = cache.lookup(requested)
    assert cache.fits(requested, hit, 8, leaving=[second])
    assert not cache.fits(requested, hit, 9, leaving=[second])
    assert not cache.fits(requested, hit, 8, leaving=[first])
    assert cache.fits(requested, hit, 16, leaving=[first, second])


def test_blocks_in_the_prefix_hit_do_not_count_as_freed_by_a_leaving_request():
    cache = manager(full(), num_blocks=4)
    first = computed(cache, range(16))
    requested = request([*range(8), 50, 51, 52, 53, 54, 55, 56, 57, 58], "s")
    hit = cache.lookup(requested)
    assert hit.num_tokens == 8
    assert cache.fits(requested, hit, 16, leaving=[first])
    assert not cache.fits(requested, hit, 17, leaving=[first])
    cache.free(first, last_step=-1)
    assert cache.admit(requested, cache.lookup(requested), 16)


def test_pinned_blocks_are_kept_after_their_request():
    cache = manager(full(), num_blocks=4)
    first = computed(cache, range(8))
    blocks = list(first.blocks[0])
    cache.pin(blocks)
    cache.free(first, last_step=-1)
    assert cache.num_free_blocks == 2 and not cache.reset_prefix_cache()
    cache.check_integrity([])
    cache.unpin(blocks)
    assert cache.num_free_blocks == 4
    with pytest.raises(ValueError):
        cache.unpin(blocks)


def test_the_integrity_check_finds_a_block_freed_too_early():
    cache = manager(full(6))
    first = computed(cache, range(16))
    cache.advance(first)
    cache._pool.free([first.blocks[0][2]])
    first.blocks[0][2] = 0
    first.num_dropped_blocks[0] = 3
    with pytest.raises(AssertionError, match="freed although the request needs it"):
        cache.check_integrity([first])

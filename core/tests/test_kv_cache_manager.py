from itertools import pairwise

import pytest

from dovetail.interfaces import KVCacheConfig, KVCacheGroup, NoCacheSpec
from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

SIZE = 4
NOTHING = Hit(0, [()])


def manager(num_blocks=10, *, caching=True):
    group = KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=SIZE))
    config = KVCacheConfig(num_blocks=num_blocks + 1, groups=(group,))
    return KVCacheManager(config, enable_prefix_caching=caching)


def request(tokens, *, salt="", **params):
    requested = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=tuple(tokens),
        sampling_params=SamplingParams(**params),
        max_tokens=8,
        cache_salt=salt,
    )
    return Request(requested, max_model_len=64)


def served(cache, tokens, **changes):
    """Compute a request completely and free it. Return it."""
    new_request = request(tokens, **changes)
    assert cache.admit(new_request, cache.lookup(new_request), new_request.num_tokens)
    new_request.num_computed_tokens = new_request.num_tokens
    cache.commit(new_request)
    blocks = new_request.blocks[0]
    cache.free(new_request, last_step=-1)
    return blocks


def test_a_request_gets_as_many_blocks_as_its_tokens_need():
    cache, first = manager(), request(range(9))
    assert cache.max_tokens == 40
    assert cache.admit(first, NOTHING, 9)
    assert len(first.blocks[0]) == 3 and first.capacity == 12
    assert cache.num_free_blocks == 7 and cache.usage == pytest.approx(0.3)
    cache.check_integrity([first])
    cache.free(first, last_step=-1)
    assert first.blocks == [] and first.capacity == 0
    cache.check_integrity([])


def test_a_failed_allocation_allocates_no_block():
    cache, first = manager(2), request(range(9))
    assert not cache.admit(first, NOTHING, 9)
    assert first.blocks == [] and cache.num_free_blocks == 2


def test_growing_a_request_allocates_all_new_blocks_or_none():
    cache, first = manager(3), request(range(4))
    cache.admit(first, NOTHING, 4)
    assert cache.grow(first, 5) == [first.blocks[0][1:]] and first.capacity == 8
    assert cache.grow(first, 13) is None
    assert first.capacity == 8 and cache.num_free_blocks == 1
    cache.check_integrity([first])


@pytest.mark.parametrize(
    ("num_same", "num_tokens", "num_found"),
    [(8, 12, 2), (7, 12, 1), (8, 9, 2), (8, 8, 1), (3, 12, 0)],
)
def test_full_blocks_of_a_common_prefix_are_found(num_same, num_tokens, num_found):
    cache = manager()
    blocks = served(cache, range(8))
    later = request([*range(num_same), *range(50, 50 + num_tokens - num_same)])
    assert cache.lookup(later).blocks[0] == blocks[:num_found]


def test_the_last_token_is_never_a_prefix_hit():
    cache = manager()
    blocks = served(cache, range(8))
    assert cache.lookup(request(range(8))).blocks[0] == blocks[:1]
    assert cache.lookup(request(range(4))).num_tokens == 0


def test_equal_tokens_after_different_prefixes_do_not_match():
    cache = manager()
    served(cache, range(8))
    assert cache.lookup(request([99, 1, 2, 3, 4, 5, 6, 7, 8])).num_tokens == 0


def test_prefixes_are_not_shared_across_salts():
    cache = manager()
    blocks = served(cache, range(8), salt="a")
    assert cache.lookup(request(range(9), salt="b")).num_tokens == 0
    assert cache.lookup(request(range(9))).num_tokens == 0
    assert cache.lookup(request(range(9), salt="a")).blocks[0] == blocks


def test_a_request_with_prompt_logprobs_gets_no_prefix_hit_but_shares_its_blocks():
    cache = manager()
    served(cache, range(8), prompt_logprobs=1)
    assert cache.lookup(request(range(9), prompt_logprobs=0)).num_tokens == 0
    assert cache.lookup(request(range(9))).num_tokens == 8


def test_without_prefix_caching_no_block_is_cached():
    cache = manager(caching=False)
    served(cache, range(8))
    assert cache.lookup(request(range(9))).num_tokens == 0
    assert cache.prefix_queries == 0


def test_a_cached_prefix_is_shared_while_its_first_request_runs():
    cache, first, second = manager(), request(range(8)), request(range(9))
    cache.admit(first, NOTHING, 8)
    first.num_computed_tokens = 8
    cache.commit(first)
    assert cache.admit(second, cache.lookup(second), 9)
    assert second.blocks[0][:2] == first.blocks[0]
    assert cache.num_free_blocks == 7
    cache.check_integrity([first, second])
    cache.free(first, last_step=-1)
    cache.check_integrity([second])


def test_a_prefix_hit_in_free_blocks_reduces_the_number_of_free_blocks():
    cache = manager(3)
    served(cache, range(8))
    first = request(range(13))  # needs two cached and two new blocks; one new block is free
    assert not cache.admit(first, cache.lookup(first), 13)
    assert cache.admit(first, cache.lookup(first), 12)
    assert cache.num_free_blocks == 0


def test_only_computed_tokens_with_known_values_are_committed():
    cache, first = manager(), request(range(7))
    cache.admit(first, NOTHING, 8)
    first.num_computed_tokens = 8  # a plan in flight computes a token that is not known yet
    cache.commit(first)
    assert first.num_committed_blocks == 1
    first.token_ids.append(7)
    cache.commit(first)
    assert first.num_committed_blocks == 2
    assert cache.lookup(request(range(9))).num_tokens == 8


def test_prefix_cache_hits_and_queries_are_not_counted_again_after_a_preemption():
    cache = manager()
    served(cache, range(8))
    first = request(range(10))
    cache.admit(first, cache.lookup(first), 10)
    assert (cache.prefix_queries, cache.prefix_hits) == (18, 8)
    cache.free(first, last_step=-1)
    first.num_preemptions = 1
    cache.admit(first, cache.lookup(first), 10)
    assert (cache.prefix_queries, cache.prefix_hits) == (18, 8)


def test_a_prefix_cache_reset_is_rejected_while_blocks_are_in_use():
    cache, first = manager(), request(range(5))
    served(cache, range(8))
    cache.admit(first, NOTHING, 5)
    assert not cache.reset_prefix_cache()
    assert cache.lookup(request(range(9))).num_tokens == 8
    cache.free(first, last_step=-1)
    assert cache.reset_prefix_cache()
    assert cache.lookup(request(range(9))).num_tokens == 0


def test_the_integrity_check_finds_a_lost_block():
    cache, first = manager(), request(range(5))
    cache.admit(first, NOTHING, 5)
    first.blocks[0].pop()
    with pytest.raises(AssertionError):
        cache.check_integrity([first])


def test_the_blocks_of_many_long_requests_are_freed_over_several_steps(drive, monkeypatch):
    monkeypatch.setattr("dovetail.kv_cache.retiring_blocks.MAX_BLOCKS_FREED", 10)
    driver = drive(num_blocks=100, max_num_seqs=10)
    driver.step()  # the changed limit applies from the next step on
    for number in range(10):
        driver.add(f"r{number}", 24, max_tokens=9)
    for _ in range(8):
        driver.step()
    scheduler = driver.scheduler
    names = [f"r{number}" for number in range(10)]
    assert len(driver.running()) == 10 and scheduler.abort_requests(names) == names
    scheduler.check_integrity()
    driver.add("other", 240, max_tokens=1)  # this request needs the freed blocks
    num_transfers = [scheduler.depth().num_transfers]
    while num_transfers[-1]:
        assert not scheduler.reset_prefix_cache()
        driver.step()
        num_transfers.append(scheduler.depth().num_transfers)
    assert num_transfers[0] >= 8 and all(
        before - after <= 2 for before, after in pairwise(num_transfers)
    )
    driver.run()
    assert driver.reasons == {"other": "length"} and driver.stats.num_preemptions == 0
    assert scheduler.reset_prefix_cache()

"""Allocation of the blocks for many decode steps at once."""

import random

import pytest

from dovetail.interfaces import KVCacheConfig, KVCacheGroup, NoCacheSpec
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

SIZE = 4


def cache_with_history(num_blocks, *, caching, seed):
    """Return a cache whose free blocks are in a random order."""
    group = KVCacheGroup(layer_names=(), spec=NoCacheSpec(block_size=SIZE))
    config = KVCacheConfig(num_blocks=num_blocks + 1, groups=(group,))
    cache, rng = KVCacheManager(config, enable_prefix_caching=caching), random.Random(seed)
    requests = [decoding(cache, f"old {n}", rng.randint(1, 9), seed=n) for n in range(3)]
    for request in rng.sample(requests, 3):
        request.num_computed_tokens = 1  # no block is full, so none stays in the prefix cache
        cache.free(request, last_step=-1)
    return cache


def decoding(cache, name, num_blocks, *, seed, num_outputs=200):
    """Return a request whose last block is full, and whose later tokens are known."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(1000) for _ in range(num_blocks * SIZE))
    requested = EngineCoreRequest(
        request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(), max_tokens=999
    )
    request = Request(requested, max_model_len=9999)
    assert cache.admit(request, cache.lookup(request), len(prompt))
    request.num_computed_tokens = len(prompt)
    request.token_ids.extend([7] * num_outputs)
    return request


def grow_step_by_step(cache, requests, num_blocks):
    for index in range(num_blocks):
        request = requests[index % len(requests)]
        request.num_computed_tokens = request.capacity
        assert cache.next_blocks([request]) is not None


def state(cache, requests):
    """Return all state that affects later decisions. Allocates all free blocks."""
    tables = [(item.blocks, item.capacity, item.num_committed_blocks) for item in requests]
    hashes = [item.block_hashes for item in requests]
    counts = cache.num_cached, cache.num_evictions, cache.num_free_blocks
    rest = decoding(cache, "rest", cache.num_free_blocks, seed=99)
    return tables, hashes, counts, rest.blocks


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_requests", [1, 2, 5])
def test_growing_for_many_steps_at_once_equals_growing_step_by_step(num_requests, caching):
    for seed, num_blocks in enumerate((1, 2, 7, 30)):
        states = []
        for at_once in (False, True):
            cache = cache_with_history(100, caching=caching, seed=seed)
            requests = [decoding(cache, f"r{n}", n + 1, seed=10 + n) for n in range(num_requests)]
            grow_step_by_step(cache, requests, num_requests)
            if at_once and not (caching and num_requests > 1):
                assert cache.grow_in_turn(requests, num_blocks)
            else:
                grow_step_by_step(cache, requests, num_blocks)
            for request in requests:
                request.num_computed_tokens = request.capacity
            cache.check_integrity(requests)
            states.append(state(cache, requests))
        assert states[0] == states[1]


@pytest.mark.parametrize(
    ("num_blocks", "num_requests", "committed"),
    [(60, 1, True), (3, 2, True), (3, 1, False)],
    ids=["too few free blocks", "two requests with prefix caching", "uncommitted prompt"],
)
def test_growing_for_many_steps_changes_nothing_unless_blocks_for_all_steps_are_available(
    num_blocks, num_requests, committed
):
    cache = cache_with_history(50, caching=True, seed=0)
    requests = [decoding(cache, f"r{n}", 2, seed=n) for n in range(num_requests)]
    if committed:
        grow_step_by_step(cache, requests, num_requests)
    before = [(item.blocks[0][:], item.capacity) for item in requests], cache.num_free_blocks
    assert not cache.grow_in_turn(requests, num_blocks)
    after = [(item.blocks[0][:], item.capacity) for item in requests], cache.num_free_blocks
    assert before == after


def test_cached_blocks_are_not_evicted_in_advance():
    cache = cache_with_history(20, caching=True, seed=0)
    old = decoding(cache, "old", 10, seed=1)
    cache.commit(old)
    cache.free(old, last_step=-1)
    request = decoding(cache, "r", 2, seed=2)
    grow_step_by_step(cache, [request], 1)
    assert cache.num_free_blocks == 17 and cache.num_cached == 12
    assert not cache.grow_in_turn([request], 8), "a cached block would be evicted"
    assert cache.grow_in_turn([request], 7)
    assert cache.num_evictions == 0

"""How the scheduler handles blocks of a KV connector, which is a stub here."""

import pytest

from dovetail.clock import ManualClock
from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVOutcome
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.kv_cache.remote import RemoteCache
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

SIZE = 4


class Side:
    """A connector that has the blocks `keys`. `outcome` states the finished transfers."""

    def __init__(self):
        self.keys = set()
        self.loads, self.stores = [], []
        self.outcome = KVOutcome()
        self.waits, self.takes_stores, self.ended = False, True, 0

    def has(self, keys):
        return [key in self.keys for key in keys]

    def load(self, transfer):
        self.loads.append(transfer)
        return self.waits

    def store(self, transfer):
        self.stores.append(transfer)
        return self.takes_stores

    def take_instructions(self):
        return b"orders"

    def update(self, response, rank=0):
        assert response == b"answer"
        return self.outcome

    def shutdown(self):
        self.ended += 1


def spec(window=0):
    return FullAttentionSpec(
        block_size=SIZE, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window
    )


def make(*windows, num_blocks=20):
    groups = tuple(
        KVCacheGroup(layer_names=(f"l{i}",), spec=spec(window))
        for i, window in enumerate(windows or (0,))
    )
    config = KVCacheConfig(num_blocks=num_blocks + 1, groups=groups)
    cache, side = KVCacheManager(config, enable_prefix_caching=True), Side()
    return cache, side, RemoteCache(side, cache, clock=ManualClock(), timeout_s=30.0)


def request(tokens, name="r"):
    requested = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=tuple(tokens),
        sampling_params=SamplingParams(),
        max_tokens=8,
    )
    return Request(requested, max_model_len=64)


def stored_elsewhere(*windows, tokens=range(12)):
    """Return an empty cache with a connector that has the blocks of `tokens`."""
    cache, side, remote = make(*windows)
    first = request(tokens, "before")
    cache.admit(first, remote.lookup(first), len(tokens))
    first.num_computed_tokens = len(tokens)
    cache.commit(first)
    remote.offer(first)
    remote.release(first, finished=True)
    cache.free(first, last_step=-1)
    for transfer in side.stores:
        side.keys |= set(transfer.keys)
    side.outcome = KVOutcome(done=tuple(transfer.transfer_id for transfer in side.stores))
    assert remote.update(b"answer") == []
    assert remote.num_stored_blocks == sum(len(t.keys) for t in side.stores)
    assert cache.reset_prefix_cache()
    return cache, side, remote


def load(cache, remote, name="r", tokens=range(13)):
    first = request(tokens, name)
    hit = remote.lookup(first)
    assert cache.admit(first, hit, first.num_tokens)
    return first, hit, remote.load(first, hit)


def test_committed_blocks_are_offered_once_and_kept_until_they_are_stored():
    cache, side, remote = make()
    first_request = request(range(14))
    cache.admit(first_request, remote.lookup(first_request), 14)
    first_request.num_computed_tokens = 9
    cache.commit(first_request)
    remote.offer(first_request)
    remote.offer(first_request)
    (first,) = side.stores
    assert first.block_ids == tuple(first_request.blocks[0][:2]) and len(set(first.keys)) == 2
    first_request.num_computed_tokens = 14
    cache.commit(first_request)
    blocks = list(first_request.blocks[0])
    remote.release(first_request, finished=True)
    _, second = side.stores
    assert second.block_ids == (blocks[2],) and second.transfer_id != first.transfer_id
    cache.free(first_request, last_step=-1)
    assert cache.num_free_blocks == 20 - 3 and remote.num_transfers == 2
    side.outcome = KVOutcome(done=(second.transfer_id,), failed={first.transfer_id: (blocks[1],)})
    assert remote.update(b"answer") == []
    assert cache.num_free_blocks == 20 and remote.num_stored_blocks == 2
    cache.check_integrity([])


def test_blocks_known_to_the_connector_are_not_stored_again_and_rejected_blocks_are_not_kept():
    cache, side, remote = stored_elsewhere()
    side.stores.clear()
    first, _, _ = load(cache, remote)
    side.outcome = KVOutcome(done=(side.loads[0].transfer_id,))
    remote.update(b"answer")
    remote.offer(first)
    assert side.stores == []
    other = request(range(50, 58), "other")
    cache.admit(other, remote.lookup(other), 8)
    other.num_computed_tokens = 8
    cache.commit(other)
    side.takes_stores = False
    remote.offer(other)
    assert len(side.stores) == 1 and remote.num_transfers == 0
    cache.check_integrity([first, other])


def test_remote_blocks_count_as_hits_and_are_committed_when_loaded():
    cache, side, remote = stored_elsewhere()
    first, hit, waits = load(cache, remote)
    assert hit.num_tokens == 12 and len(hit.missing) == 3 and not waits
    (transfer,) = side.loads
    assert transfer.block_ids == tuple(first.blocks[0][:3])
    assert set(transfer.keys) <= side.keys
    first.num_computed_tokens = 13
    cache.commit(first)
    assert cache.num_cached == 0  # the blocks are not cached until the load has ended
    cache.check_integrity([first])
    side.outcome = KVOutcome(done=(transfer.transfer_id,))
    assert remote.update(b"answer") == [(first, True)]
    assert cache.num_cached == 3 and remote.num_loaded_blocks == 3
    assert cache.lookup(request(range(13), "next")).num_tokens == 12
    cache.check_integrity([first])


def test_blocks_in_the_local_cache_are_not_loaded():
    cache, side, remote = stored_elsewhere()
    first, _, _ = load(cache, remote, "one", range(9))
    side.outcome = KVOutcome(done=(side.loads[0].transfer_id,))
    remote.update(b"answer")
    second, hit, _ = load(cache, remote, "two")
    assert hit.num_tokens == 12 and hit.missing == ((0, 2),)
    assert second.blocks[0][:2] == first.blocks[0][:2]
    assert side.loads[1].block_ids == (second.blocks[0][2],)
    cache.check_integrity([first, second])


def test_only_the_visible_blocks_of_a_window_are_loaded():
    cache, side, remote = stored_elsewhere(0, 5)
    first, hit, _ = load(cache, remote)
    assert hit.missing == ((0, 0), (0, 1), (0, 2), (1, 2))
    (transfer,) = side.loads
    full, window = first.blocks
    assert transfer.block_ids == (*full[:3], window[2]) and window[:2] == [0, 0]
    assert len(set(transfer.keys)) == 4
    cache.check_integrity([first])


def test_a_failed_load_keeps_valid_blocks_and_is_not_retried():
    cache, side, remote = stored_elsewhere()
    side.waits = True
    first, _, waits = load(cache, remote)
    assert waits
    (transfer,) = side.loads
    side.outcome = KVOutcome(failed={transfer.transfer_id: (first.blocks[0][1],)})
    assert remote.update(b"answer") == [(first, False)]
    assert (remote.num_failed_loads, remote.num_loaded_blocks) == (1, 2)
    remote.release(first, finished=False)
    cache.free(first, last_step=-1)
    assert remote.lookup(first).num_tokens == 4 and not remote.lookup(first).missing
    assert remote.lookup(request(range(13), "other")).num_tokens == 12
    remote.release(first, finished=True)
    again = request(range(13))  # another request with the same id
    assert remote.lookup(again).num_tokens == 12


@pytest.mark.parametrize("failed", [False, True])
def test_the_blocks_of_a_request_that_ends_while_loading_are_kept_until_the_load_ends(failed):
    cache, side, remote = stored_elsewhere()
    first, _, _ = load(cache, remote)
    blocks = first.blocks[0][:3]
    remote.release(first, finished=True)
    cache.free(first, last_step=-1)
    assert cache.num_free_blocks == 17
    (transfer,) = side.loads
    done = KVOutcome(done=(transfer.transfer_id,))
    side.outcome = KVOutcome(failed={transfer.transfer_id: tuple(blocks)}) if failed else done
    assert remote.update(b"answer") == []
    assert cache.num_free_blocks == 20 and cache.num_cached == 0
    cache.check_integrity([])


def test_shutdown_frees_all_blocks_of_transfers():
    cache, side, remote = stored_elsewhere()
    first, _, _ = load(cache, remote)
    remote.release(first, finished=True)
    cache.free(first, last_step=-1)
    assert remote.take_instructions() == b"orders"
    remote.shutdown()
    remote.shutdown()
    assert side.ended == 2 and remote.num_transfers == 0
    assert cache.num_free_blocks == 20

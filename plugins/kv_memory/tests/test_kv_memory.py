"""Tests of the store, the options, and the conditions under which two engines share blocks."""

from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVConnectorContext,
    KVTransfer,
)
from dovetail_devkit.contexts import make_config, write_fake_config
from dovetail_devkit.suites.kv_connector import check_kv_connector
from dovetail_kv_memory import MemoryConnector, MemoryOptions
from dovetail_kv_memory.store import BlockStore, shared_store

PAGE = 10


def page(fill=0):
    return torch.full((PAGE,), fill, dtype=torch.uint8)


@pytest.mark.parametrize(
    "options", [{}, {"asynchronous": True}], ids=["synchronous", "asynchronous"]
)
def test_the_connector_meets_its_contract(options):
    check_kv_connector(MemoryConnector, torch.device("cpu"), options=options)


def test_the_least_recently_used_pages_are_dropped_first():
    store = BlockStore(4 * PAGE)
    feed = store.attach()
    for name in (b"a", b"b"):
        store.put(name, [page(), page()])
    assert store.get(b"a") is not None
    store.put(b"c", [page(), page()])
    assert store.get(b"b") is None and store.get(b"a") is not None
    assert store.num_bytes == 4 * PAGE
    assert store.take_changes(feed) == {b"a": True, b"b": False, b"c": True}
    assert store.take_changes(feed) == {}


def test_a_block_larger_than_the_capacity_is_not_stored():
    store = BlockStore(2 * PAGE)
    store.put(b"a", [page()])
    store.put(b"b", [page(), page(), page()])
    assert store.get(b"b") is None and store.get(b"a") is not None


def test_a_stored_key_keeps_its_first_pages():
    store = BlockStore(2 * PAGE)
    store.put(b"a", [page(1)])
    store.put(b"a", [page(2)])
    (kept,) = store.get(b"a")
    assert kept[0] == 1 and store.num_bytes == PAGE


def test_a_new_feed_starts_with_all_stored_keys():
    store = BlockStore(10 * PAGE)
    store.put(b"a", [page()])
    feed = store.attach()
    store.put(b"b", [page()])
    assert store.take_changes(feed) == {b"a": True, b"b": True}


def test_a_store_is_shared_by_name_and_freed_after_its_last_user():
    store = shared_store("name", 100)
    assert shared_store("name", 5) is store and store.capacity_bytes == 100
    assert shared_store("other", 5) is not store
    del store
    assert shared_store("name", 5).capacity_bytes == 5


def context(folder, *, groups=1, rank=0, options=None, **changes):
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32")
    created = tuple(KVCacheGroup(layer_names=(f"l{i}",), spec=spec) for i in range(groups))
    return KVConnectorContext(
        config=make_config(write_fake_config(folder), **changes).worker_config(),
        kv_cache=KVCacheConfig(num_blocks=3, groups=created),
        rank=rank,
        options=options or {},
    )


def sharing(first, other):
    """Return whether a worker with one context finds the blocks of a worker with the other."""
    sides = [MemoryConnector.create_worker_side(first), MemoryConnector.create_worker_side(other)]
    scheduler = MemoryConnector.create_scheduler_side(first)
    scheduler.store(KVTransfer(transfer_id=1, request_id="r", keys=(b"k",), block_ids=(1,)))
    for side in sides:
        side.register([torch.zeros((3, PAGE), dtype=torch.uint8)])
    sides[0].begin(scheduler.take_instructions())
    sides[0].finish()
    reader = MemoryConnector.create_scheduler_side(other)
    reader.update(sides[1].finish())
    for side in sides:
        side.shutdown()
    return reader.has([b"k"]) == [True]


@pytest.mark.parametrize(
    ("changes", "shares"),
    [
        ({}, True),
        ({"max_model_len": 32}, True),
        ({"num_threads": 2}, True),
        ({"served_model_name": "other"}, True),
        ({"groups": 2}, False),
        ({"rank": 1}, False),
        ({"load_format": "own"}, False),
        ({"seed": 5}, False),
        ({"attention_backend": "own"}, False),
        ({"hf_overrides": {"rope_theta": 5}}, False),
    ],
)
def test_engines_share_blocks_only_if_their_pages_are_interchangeable(tmp_path, changes, shares):
    assert sharing(context(tmp_path), context(tmp_path, **changes)) == shares


@pytest.mark.parametrize("options", [{"capacity_bytes": -1}, {"asynchronous": "x"}, {"size": 3}])
def test_invalid_options_are_rejected(options):
    with pytest.raises(ValidationError):
        MemoryOptions(**options)


def test_an_asynchronous_load_is_reported_when_it_has_ended(tmp_path):
    requested = context(tmp_path, options={"asynchronous": True})
    scheduler = MemoryConnector.create_scheduler_side(requested)
    worker = MemoryConnector.create_worker_side(requested)
    cache = torch.arange(3 * PAGE, dtype=torch.uint8).view(3, PAGE)
    worker.register([cache])
    scheduler.store(KVTransfer(transfer_id=1, request_id="r", keys=(b"k",), block_ids=(1,)))
    worker.begin(scheduler.take_instructions())
    assert scheduler.update(worker.finish()).done == (1,)
    assert scheduler.load(KVTransfer(transfer_id=2, request_id="r", keys=(b"k",), block_ids=(2,)))
    worker.begin(scheduler.take_instructions())
    ended = SimpleNamespace(done=())
    while not ended.done:
        ended = scheduler.update(worker.finish())
    assert ended.done == (2,) and torch.equal(cache[2], cache[1])
    worker.shutdown()
    worker.shutdown()

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.kv_cache.encoder_cache import EncoderCacheManager
from dovetail.request import EncoderInput, EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

CAPACITY = 10


def request(name, *contents):
    """Make a request. Each input is (hash, number of embeddings)."""
    items, end = [], 0
    for content, size in contents:
        items.append(EncoderInput(position=end, num_tokens=size, content_hash=content))
        end += size
    requested = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=(1,) * (end + 1),
        sampling_params=SamplingParams(),
        max_tokens=1,
        encoder_inputs=tuple(items),
    )
    return Request(requested, max_model_len=256)


def test_an_encoder_output_is_computed_once_and_shared():
    cache = EncoderCacheManager(CAPACITY)
    first, second = request("one", (b"cat", 4)), request("two", (b"dog", 2), (b"cat", 4))
    assert not cache.has(first.encoder_inputs[0])
    assert cache.allocate(first, 0) and cache.has(second.encoder_inputs[1])
    assert not cache.allocate(second, 1)
    assert (cache.num_used, cache.num_cached) == (4, 4)
    cache.free(first)
    assert cache.num_used == 4
    cache.free_input(second, 1)
    assert (cache.num_used, cache.num_cached) == (0, 4)
    assert not cache.allocate(first, 0)  # the output was still cached
    assert (cache.num_queries, cache.num_hits, cache.num_evictions) == (3, 2, 0)
    cache.check_integrity([first])


def test_the_least_recently_used_output_is_freed_first_and_reported_once():
    cache = EncoderCacheManager(CAPACITY)
    first = request("one", (b"a", 4), (b"b", 4), (b"c", 4), (b"d", 2))
    for index in (0, 1):
        cache.allocate(first, index)
    for index in (1, 0):
        cache.free_input(first, index)
    assert cache.allocate(first, 2)
    assert cache.take_evicted() == [b"b"] and cache.take_evicted() == []
    assert cache.allocate(first, 3)
    assert cache.take_evicted() == [] and cache.num_cached == CAPACITY
    assert cache.has(first.encoder_inputs[0]) and not cache.has(first.encoder_inputs[1])
    assert cache.num_evictions == 1


def test_encoder_inputs_can_be_allocated_only_if_they_fit_together():
    cache = EncoderCacheManager(CAPACITY)
    first = request("one", (b"a", 6), (b"b", 4), (b"c", 1))
    assert cache.can_allocate(first.encoder_inputs[:2])
    assert not cache.can_allocate(first.encoder_inputs)
    assert cache.can_allocate([*first.encoder_inputs[:2], first.encoder_inputs[0]])
    cache.allocate(first, 0)
    assert cache.can_allocate(first.encoder_inputs[:2])
    cache.allocate(first, 1)
    with pytest.raises(LookupError, match="1 embeddings are needed, but only 0 are free"):
        cache.allocate(first, 2)
    cache.check_integrity([first])
    cache.free_input(first, 0)
    assert cache.can_allocate(first.encoder_inputs[2:])
    assert not cache.can_allocate([first.encoder_inputs[0], first.encoder_inputs[2]])


def test_allocating_or_freeing_an_encoder_input_twice_has_no_effect():
    cache = EncoderCacheManager(CAPACITY)
    first = request("one", (b"a", 3))
    assert cache.allocate(first, 0) and not cache.allocate(first, 0)
    assert cache.num_queries == 1
    cache.free_input(first, 0)
    cache.free_input(first, 0)
    cache.free(first)
    assert cache.num_used == 0
    cache.check_integrity([])


def test_a_reset_is_rejected_while_outputs_are_in_use_and_reports_freed_outputs():
    cache = EncoderCacheManager(CAPACITY)
    first = request("one", (b"a", 3), (b"b", 3))
    cache.allocate(first, 0)
    cache.allocate(first, 1)
    cache.free_input(first, 0)
    assert not cache.reset() and cache.num_cached == 6
    cache.free(first)
    assert cache.reset() and cache.num_cached == 0
    assert cache.take_evicted() == [b"a", b"b"]
    assert cache.allocate(first, 0)


def test_the_integrity_check_finds_encoder_outputs_that_were_not_freed():
    cache = EncoderCacheManager(CAPACITY)
    first = request("one", (b"a", 3))
    cache.allocate(first, 0)
    with pytest.raises(AssertionError, match="a request that has ended"):
        cache.check_integrity([])


SIZES = {b"a": 1, b"b": 2, b"c": 4, b"d": 7}


class EncoderMachine(RuleBasedStateMachine):
    """A state machine that compares the cache with a model of references and contents."""

    def __init__(self):
        super().__init__()
        self.cache = EncoderCacheManager(CAPACITY)
        self.requests = [
            request(f"r{i}", *((name, SIZES[name]) for name in names))
            for i, names in enumerate(((b"a", b"b", b"a"), (b"c", b"d"), (b"b", b"c"), (b"d",)))
        ]
        self.held = set()
        self.on_worker = set()

    @rule(data=st.data())
    def allocate(self, data):
        first = data.draw(st.sampled_from(self.requests))
        index = data.draw(st.integers(0, len(first.encoder_inputs) - 1))
        item = first.encoder_inputs[index]
        used = {name for _, _, name in self.held} | {item.content_hash}
        fits = sum(SIZES[name] for name in used) <= CAPACITY
        assert self.cache.can_allocate([item]) == fits
        if not fits:
            with pytest.raises(LookupError):
                self.cache.allocate(first, index)
            return
        computes = self.cache.allocate(first, index)
        self.on_worker -= set(self.cache.take_evicted())
        assert computes == (item.content_hash not in self.on_worker)
        self.on_worker.add(item.content_hash)
        self.held.add((first.request_id, index, item.content_hash))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_input(self, data):
        name, index, content = data.draw(st.sampled_from(sorted(self.held)))
        self.held.remove((name, index, content))
        (item,) = (item for item in self.requests if item.request_id == name)
        self.cache.free_input(item, index)

    @rule(data=st.data())
    def free(self, data):
        first = data.draw(st.sampled_from(self.requests))
        self.held = {entry for entry in self.held if entry[0] != first.request_id}
        self.cache.free(first)

    @rule()
    def reset(self):
        assert self.cache.reset() == (not self.held)
        self.on_worker -= set(self.cache.take_evicted())

    @invariant()
    def whole(self):
        names = {entry[0] for entry in self.held}
        self.cache.check_integrity([item for item in self.requests if item.request_id in names])
        used = {content for _, _, content in self.held}
        assert self.cache.num_used == sum(SIZES[name] for name in used)
        assert used <= self.on_worker
        assert self.cache.num_cached == sum(SIZES[name] for name in self.on_worker) <= CAPACITY


TestEncoderMachine = EncoderMachine.TestCase
TestEncoderMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

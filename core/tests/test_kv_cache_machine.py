"""The KV-cache manager compared with a simple model of slot contents and prefix hits.

Like a worker, the model writes into each slot the tokens that the slot represents. So a block that
is shared incorrectly, freed too early or found by a wrong hash has wrong content.
"""

from dataclasses import replace
from math import lcm

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.interfaces import FullAttentionSpec, KVCacheConfig, KVCacheGroup, StateSpec
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import EngineCoreRequest, Request
from dovetail.sampling_params import SamplingParams

SIZE, NUM_BLOCKS, MAX_STEP = 2, 24, 6


def full(window=0, size=SIZE):
    return FullAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window
    )


def snapshots(size=SIZE):
    return StateSpec(block_size=size, num_bytes=64, snapshots=True)


SHAPES = {
    "full": [full()],
    "window": [full(5)],
    "full and window": [full(), full(3)],
    "two windows": [full(3), full(6)],
    "full and chunks": [full(), replace(full(), chunk_size=2 * SIZE)],
    "chunks": [replace(full(), chunk_size=2 * SIZE)],
    "full and snapshots": [full(), snapshots()],
    "window, full, snapshots": [full(4), full(), snapshots()],
    "larger blocks for one": [full(), full(size=2 * SIZE)],
    "blocks of 2 and 3": [full(size=2 * SIZE), full(size=3 * SIZE)],
    "windows with larger blocks": [full(5, 2 * SIZE), full(), full(3, 3 * SIZE)],
    "seldom snapshots": [full(), snapshots(3 * SIZE)],
    "full and one state": [full(), StateSpec(block_size=SIZE, num_bytes=64)],
}
BEGINNINGS = [(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2), (1, 2, 3, 4, 9, 9, 9, 9), (5,) * 9, ()]


class CacheMachine(RuleBasedStateMachine):
    """A state machine that admits, computes, grows and frees requests in a cache with `specs`."""

    specs = SHAPES["full"]

    def __init__(self):
        super().__init__()
        groups = tuple(
            KVCacheGroup(layer_names=(f"l{i}",), spec=spec) for i, spec in enumerate(self.specs)
        )
        config = KVCacheConfig(num_blocks=NUM_BLOCKS + 1, groups=groups)
        self.cache = KVCacheManager(config, enable_prefix_caching=True, max_step_tokens=MAX_STEP)
        self.alive = []
        self.slots = {}  # maps (block, offset) to the content
        self.names = {}  # maps the content at the end of a block to the cached block
        self.num_named = {}  # maps a request id to the number of offered blocks
        self.retiring = []  # pairs of (last step, freed blocks)
        self.step = 0
        self.cache.executed(0)
        self.num_made = 0

    # --- the model of the cache

    def content(self, request, group, position):
        """Return the content of a position in a group: the group and all tokens up to it."""
        return group, request.cache_salt, tuple(request.token_ids[: position + 1])

    def held(self):
        tables = [table for request in self.alive for table in request.blocks]
        blocks = [block for table in tables for block in table if block]
        return {*blocks, *(block for _, blocks in self.retiring for block in blocks)}

    def needed(self, group, start):
        """Return the positions before `start` that a token at `start` reads in a group."""
        spec = self.specs[group]
        if isinstance(spec, StateSpec):
            return [start - 1] if start else []
        if spec.chunk_size:
            return range(start // spec.chunk_size * spec.chunk_size, start)
        window = spec.sliding_window
        return range(max(0, start - window + 1) if window else 0, start)

    def slot(self, request, group, position):
        spec, table = self.specs[group], request.blocks[group]
        size = spec.block_size
        if isinstance(spec, StateSpec):
            return table[position // size if spec.snapshots else 0], "state"
        return table[position // size], position % size

    def longest(self, request):
        """Return the longest prefix of full blocks that all groups can resume."""
        if any(isinstance(spec, StateSpec) and not spec.snapshots for spec in self.specs):
            return 0
        whole = lcm(*(spec.block_size for spec in self.specs))
        longest = (request.num_tokens - 1) // whole * whole
        for length in range(longest, 0, -whole):
            if all(
                self.content(request, group, block * spec.block_size + spec.block_size - 1)
                in self.names
                for group, spec in enumerate(self.specs)
                for block in {p // spec.block_size for p in self.needed(group, length)}
            ):
                return length
        return 0

    def handed_out(self, blocks):
        """Record that blocks are allocated again. Their cached content is lost."""
        self.names = {name: block for name, block in self.names.items() if block not in blocks}

    def note_names(self, request):
        """Record the blocks that a commit caches: full blocks of computed, known tokens.

        A block whose content is cached elsewhere is not cached again.
        """
        start = self.num_named[request.request_id]
        end = min(request.num_computed_tokens, request.num_tokens)
        self.num_named[request.request_id] = max(start, end)
        for group, spec in enumerate(self.specs):
            if isinstance(spec, StateSpec) and not spec.snapshots:
                continue
            size = spec.block_size
            for number in range(start // size, end // size):
                block = request.blocks[group][number]
                name = self.content(request, group, number * size + size - 1)
                if block and name not in self.names and block not in self.names.values():
                    self.names[name] = block

    def compute(self, request, count):
        """Act as a worker: read the slots that the tokens need, then write their slots."""
        start = request.num_computed_tokens
        for group in range(len(self.specs)):
            for position in self.needed(group, start):
                slot = self.slot(request, group, position)
                assert slot[0], "a needed block was freed"
                assert self.slots.get(slot) == self.content(request, group, position)
            for position in range(start, min(start + count, request.num_tokens)):
                slot = self.slot(request, group, position)
                self.slots[slot] = self.content(request, group, position)
        request.num_computed_tokens = start + count

    # --- rules

    @rule(data=st.data(), salt=st.sampled_from(["", "", "s"]))
    def admit(self, data, salt):
        beginning = data.draw(st.sampled_from(BEGINNINGS))
        cut = data.draw(st.integers(0, len(beginning)))
        tokens = [*beginning[:cut], *data.draw(st.lists(st.integers(1, 9), max_size=6)), 3]
        self.num_made += 1
        requested = EngineCoreRequest(
            request_id=str(self.num_made),
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(),
            max_tokens=20,
            cache_salt=salt,
        )
        request = Request(requested, max_model_len=64)
        hit = self.cache.lookup(request)
        assert hit.num_tokens == self.longest(request)
        count = min(request.num_tokens - hit.num_tokens, data.draw(st.integers(1, MAX_STEP)))
        end = hit.num_tokens + count
        leaving = (
            data.draw(st.lists(st.sampled_from(self.alive), unique=True)) if self.alive else []
        )
        self.check_fits(request, hit, end, leaving)
        before = self.held()
        free = NUM_BLOCKS - len(before)
        if not self.cache.admit(request, hit, end):
            assert self.demand(hit, end) > free - len(self.taken(hit) - before)
            assert not request.blocks
            return
        self.alive.append(request)
        self.handed_out({b for t in request.blocks for b in t} - self.taken(hit) - {0})
        assert self.held() - before <= {b for t in request.blocks for b in t}
        request.num_computed_tokens = hit.num_tokens
        self.num_named[request.request_id] = hit.num_tokens
        self.compute(request, count)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), count=st.integers(1, MAX_STEP), sample=st.booleans())
    def run(self, data, count, sample):
        request = data.draw(st.sampled_from(self.alive))
        if sample and request.num_computed_tokens >= request.num_tokens:
            request.token_ids.extend([7] * (request.num_computed_tokens + 1 - request.num_tokens))
        count = min(count, request.num_tokens - request.num_computed_tokens)
        if count < 1:
            return
        end = request.num_computed_tokens + count
        before = request.capacity
        self.cache.commit(request)
        self.note_names(request)
        grown = self.cache.grow(request, end)
        if grown is None:
            assert request.capacity == before < end
            return
        assert request.capacity >= end
        for table, blocks in zip(request.blocks, grown, strict=True):
            assert table[len(table) - len(blocks) :] == blocks
        self.handed_out({block for blocks in grown for block in blocks})
        self.compute(request, count)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def commit(self, data):
        request = data.draw(st.sampled_from(self.alive))
        self.cache.commit(request)
        self.note_names(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def advance(self, data):
        request = data.draw(st.sampled_from(self.alive))
        self.cache.commit(request)
        self.note_names(request)
        self.cache.advance(request)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), late=st.integers(0, 2))
    def end(self, data, late):
        request = data.draw(st.sampled_from(self.alive))
        self.alive.remove(request)
        blocks = [block for table in request.blocks for block in table if block]
        self.cache.free(request, last_step=self.step + late)
        if late:
            self.retiring.append((self.step + late, blocks))

    @rule()
    def execute(self):
        self.step += 1
        self.cache.executed(self.step)
        self.retiring = [entry for entry in self.retiring if entry[0] > self.step]

    @rule()
    def reset(self):
        assert self.cache.reset_prefix_cache() == (not self.held())
        if not self.held():
            self.names = {}

    # --- invariants

    def taken(self, hit):
        return {block for blocks in hit.blocks for block in blocks if block}

    def demand(self, hit, end):
        """Return the number of new blocks for an admission up to `end` tokens."""
        once = [isinstance(spec, StateSpec) and not spec.snapshots for spec in self.specs]
        sizes = [spec.block_size for spec in self.specs]
        counts = [-(-end // size) - hit.num_tokens // size for size in sizes]
        return sum(1 if is_once else count for is_once, count in zip(once, counts, strict=True))

    def check_fits(self, request, hit, end, leaving):
        keeping = [other for other in self.alive if other not in leaving]
        blocks = {b for other in keeping for table in other.blocks for b in table if b}
        blocks |= {block for _, late in self.retiring for block in late}
        room = NUM_BLOCKS - len(blocks | self.taken(hit))
        fits = self.cache.fits(request, hit, end, leaving=leaving)
        assert fits == (self.demand(hit, end) <= room)

    @invariant()
    def whole(self):
        self.cache.check_integrity(self.alive)
        assert self.cache.num_free_blocks == NUM_BLOCKS - len(self.held())
        assert self.cache.num_cached == len(self.names)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kv_cache_manager_agrees_with_a_simple_reference_model(shape):
    machine = type("Machine", (CacheMachine,), {"specs": SHAPES[shape]})
    case = machine.TestCase
    case.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
    case().runTest()

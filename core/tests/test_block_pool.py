import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dovetail.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 9


def key(number):
    return number.to_bytes(4, "little")


def test_block_0_is_never_allocated():
    pool = BlockPool(4)
    assert pool.num_free == 3
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.num_free == 0
    assert pool.usage == 1.0


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_has_at_least_one_block_in_addition_to_block_0(num_blocks):
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(num_blocks)


def test_an_allocation_of_more_blocks_than_are_free_allocates_no_block():
    pool = BlockPool(4)
    with pytest.raises(LookupError, match="4 blocks are requested, but only 3 are free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_block_freed_twice_is_an_error():
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(blocks)


def test_a_cached_block_is_found_whether_it_is_in_use_or_free():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.commit(block, key(1))
    assert pool.find([key(1)]) == [block]
    pool.take([block])
    pool.free([block])
    assert pool.num_free == 2  # another request still uses the block
    pool.free([block])
    assert pool.num_free == 3
    assert pool.num_free_among([block]) == 1
    pool.take(pool.find([key(1)]))
    assert pool.num_free_among([block]) == 0
    pool.check_integrity([block])


def test_a_cached_prefix_ends_at_the_first_missing_block():
    pool = BlockPool(6)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.commit(block, key(number))
    assert pool.find([key(0), key(1), key(7), key(2)]) == blocks[:2]
    assert pool.find([key(7), key(0)]) == []


def test_of_two_blocks_with_the_same_hash_only_the_first_is_cached():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.commit(first, key(1))
    pool.commit(second, key(1))
    assert pool.find([key(1)]) == [first]
    assert pool.num_cached == 1


def test_the_least_recently_used_block_is_evicted_first():
    pool = BlockPool(5)
    old, new = pool.allocate(2), pool.allocate(2)
    for number, block in enumerate([*old, *new]):
        pool.commit(block, key(number))
    pool.free(old)
    pool.free(new)
    assert pool.allocate(3) == [old[1], old[0], new[1]]
    assert pool.find([key(0)]) == pool.find([key(3)]) == []
    assert pool.find([key(2)]) == [new[0]]
    assert pool.num_evictions == 3


def test_reusing_an_uncached_block_is_not_counted_as_an_eviction():
    pool = BlockPool(3)
    pool.free(pool.allocate(2))
    pool.allocate(2)
    assert pool.num_evictions == 0


def test_a_reset_is_rejected_until_no_block_is_in_use():
    pool = BlockPool(4)
    used, free = pool.allocate(2)
    pool.commit(used, key(1))
    pool.commit(free, key(2))
    pool.free([free])
    assert not pool.reset_cache()
    assert pool.num_cached == 2
    pool.free([used])
    assert pool.reset_cache()
    assert pool.find([key(1)]) == pool.find([key(2)]) == []
    pool.check_integrity([])
    (again,) = pool.allocate(1)
    pool.commit(again, key(1))
    assert pool.find([key(1)]) == [again]


@pytest.mark.parametrize("held", [[1], [1, 1, 2], [3], []])
def test_the_integrity_check_finds_unknown_and_missing_references(held):
    pool = BlockPool(4)
    assert pool.allocate(2) == [1, 2]
    pool.check_integrity([1, 2])
    with pytest.raises(AssertionError):
        pool.check_integrity(held)


class PoolMachine(RuleBasedStateMachine):
    """A state machine that compares a pool with a model of the owners and contents of blocks."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held = []
        self.content = {}

    @property
    def used(self):
        return {block for blocks in self.held for block in blocks}

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count):
        if count > self.pool.num_free:
            with pytest.raises(LookupError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count and not self.used & set(blocks)
        self.content = {k: b for k, b in self.content.items() if b not in blocks}
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), number=st.integers(0, 12))
    def commit(self, data, number):
        blocks = data.draw(st.sampled_from(self.held))
        if not blocks:
            return
        block = data.draw(st.sampled_from(blocks))
        self.pool.commit(block, key(number))
        if key(number) not in self.content and block not in self.content.values():
            self.content[key(number)] = block

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(numbers=st.lists(st.integers(0, 12), max_size=4, unique=True))
    def find_and_take(self, numbers):
        actual = self.pool.find(map(key, numbers))
        expected = [self.content.get(key(number)) for number in numbers]
        cut = expected.index(None) if None in expected else len(expected)
        assert actual == expected[:cut]
        assert self.pool.num_free_among(actual) == len(set(actual) - self.used)
        self.pool.take(actual)
        self.held.append(actual)

    @rule()
    def reset(self):
        assert self.pool.reset_cache() == (not self.used)
        if not self.used:
            self.content = {}

    @invariant()
    def whole(self):
        self.pool.check_integrity(block for blocks in self.held for block in blocks)
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(self.used)
        assert self.pool.num_cached == len(self.content)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

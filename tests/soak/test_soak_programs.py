"""A short soak: every policy on every cache shape, and planted faults."""

import pytest
from soak.programs import SHAPES, Tally, make_program, play, policy_names
from soak.random_programs import MINIMUM, find_missing, first_number, show

from dovetail.kv_cache.block_pool import BlockPool
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.scheduling import scheduler
from dovetail.scheduling.step_result import process_result
from dovetail.scheduling.waiting_queue import HeapQueue

NUM_STEPS, MAX_BATCH_SLOTS = 72, 8


@pytest.mark.costly
def test_every_policy_follows_the_contract_with_every_cache_shape():
    policies, tally = policy_names(), Tally()
    for number in range(len(policies) * len(SHAPES)):
        tally.add(
            play(
                make_program(number, policies, num_steps=NUM_STEPS, max_batch_slots=MAX_BATCH_SLOTS)
            )
        )
    print(show(tally))
    assert tally.counts["steps"] >= 10_000
    assert {*policies} == {*tally.by_policy}
    assert all(tally.counts[what] > 50 for what in (*MINIMUM, "verified drafts", "encoder runs"))


def test_a_full_soak_run_reports_events_that_are_too_rare():
    tally = Tally()
    tally.counts.update(steps=1000, grants=19_000, **dict.fromkeys(MINIMUM, 20_000))
    assert find_missing(tally) == ["grants 19.0 a step"]
    tally.counts.update(aborts=MINIMUM["aborts"] - 1 - 20_000, grants=1000)
    assert find_missing(tally) == [f"aborts {MINIMUM['aborts'] - 1}"]


def test_a_commit_selects_the_programs_of_a_full_soak_run():
    numbers = {first_number(commit, 24) for commit in (b"a", b"b", b"")}
    assert len(numbers) == 3
    assert not any(number % 24 for number in numbers)


free, defer = KVCacheManager.free, HeapQueue.defer
advance, allocate = KVCacheManager.advance, BlockPool.allocate


def free_twice(manager, request, *, last_step):
    blocks = [block for table in request.blocks for block in table if block]
    free(manager, request, last_step=last_step)
    manager._pool.free(blocks[-1:])


def free_what_others_share(pool, blocks):
    for block in reversed(blocks):
        pool._ref_counts[block] = 0
        pool._free[block] = None


def leak_the_last_block(manager, request, *, last_step):
    request.blocks[0] = request.blocks[0][:-1]
    free(manager, request, last_step=last_step)


def lose_every_third(queue, request):
    if request.num_preemptions % 3:
        defer(queue, request)


def count_the_drafts_of_others(record, plan, output):
    step_result = process_result(record, plan, output)
    for request in record.counts:
        if request.row >= 0 and output.num_drafts:
            request.num_drafts = max(output.num_drafts)
    return step_result


def release_one_block_too_many(manager, request):
    advance(manager, request)
    for group, _ in manager._shedding:
        index, table = request.num_dropped_blocks[group], request.blocks[group]
        if index + 1 < len(table):
            manager._pool.free([table[index]])
            table[index], request.num_dropped_blocks[group] = 0, index + 1


def forget_that_it_is_cached(pool, num_blocks):
    blocks = allocate(pool, num_blocks)
    for block in blocks[:1]:
        pool._index.setdefault(b"stale", block)
    return blocks


FAULTS = {
    "frees a block twice": (KVCacheManager, "free", free_twice),
    "frees blocks that other requests share": (BlockPool, "free", free_what_others_share),
    "leaks a block": (KVCacheManager, "free", leak_the_last_block),
    "loses a request": (HeapQueue, "defer", lose_every_third),
    "uses stale draft counts": (scheduler, "process_result", count_the_drafts_of_others),
    "frees a block inside the window": (KVCacheManager, "advance", release_one_block_too_many),
    "leaves a stale prefix hash": (BlockPool, "allocate", forget_that_it_is_cached),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_soak_run_detects_a_planted_fault(fault, monkeypatch):
    monkeypatch.setattr(*FAULTS[fault])
    policies = policy_names()
    with pytest.raises(AssertionError, match=r"program \d+: "):
        for number in range(len(policies) * len(SHAPES)):
            play(
                make_program(number, policies, num_steps=NUM_STEPS, max_batch_slots=MAX_BATCH_SLOTS)
            )

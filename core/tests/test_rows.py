import random

import pytest

from dovetail.rows import RowAllocator


def test_the_lowest_free_row_is_allocated_first_with_generation_one():
    rows = RowAllocator(3)
    assert [rows.acquire() for _ in range(3)] == [(0, 1), (1, 1), (2, 1)]
    assert rows.num_free == 0


def test_an_allocation_without_a_free_row_fails():
    rows = RowAllocator(1)
    rows.acquire()
    with pytest.raises(LookupError, match="all 1 rows"):
        rows.acquire()


def test_a_freed_row_is_not_reused_until_the_last_step_that_uses_it_is_executed():
    rows = RowAllocator(1)
    rows.acquire()
    rows.release(0, last_step=5)
    assert rows.num_free == 0
    rows.executed(4)
    assert rows.num_free == 0
    rows.executed(5)
    assert rows.acquire() == (0, 2)


def test_a_row_is_free_immediately_if_its_last_step_is_executed():
    rows = RowAllocator(1)
    rows.acquire()
    rows.executed(7)
    rows.release(0, last_step=7)
    assert rows.num_free == 1


def test_each_row_has_its_own_generation():
    rows = RowAllocator(2)
    rows.acquire()
    rows.acquire()
    rows.executed(0)
    rows.release(1, last_step=0)
    assert rows.acquire() == (1, 2)
    rows.release(0, last_step=0)
    assert rows.acquire() == (0, 2)


@pytest.mark.parametrize("times", [1, 2])
def test_only_an_allocated_row_can_be_freed(times):
    rows = RowAllocator(2)
    if times == 2:
        rows.acquire()
        rows.release(0, last_step=3)
    with pytest.raises(ValueError, match="row 0 is not in use"):
        rows.release(0, last_step=3)


@pytest.mark.parametrize("num_rows", [0, -1])
def test_a_row_allocator_needs_at_least_one_row(num_rows):
    with pytest.raises(ValueError, match="num_rows"):
        RowAllocator(num_rows)


@pytest.mark.parametrize("seed", range(10))
def test_no_row_is_allocated_twice_or_too_early(seed):
    rng = random.Random(seed)
    rows = RowAllocator(4)
    held: dict[int, int] = {}
    busy_until: dict[int, int] = {}
    generations = [0] * 4
    step, executed = 0, -1
    for _ in range(400):
        step += 1
        if rows.num_free and rng.random() < 0.6:
            row, generation = rows.acquire()
            assert row not in held
            assert busy_until.get(row, -1) <= executed
            assert generation == generations[row] + 1
            generations[row] = generation
            held[row] = step
        if held and rng.random() < 0.5:
            row = rng.choice(sorted(held))
            del held[row]
            rows.release(row, last_step=step)
            busy_until[row] = step
        if rng.random() < 0.5:
            executed = max(executed, step - 1)
            rows.executed(executed)
    rows.executed(step)
    assert rows.num_free == 4 - len(held)


def test_freed_rows_that_a_step_in_flight_uses_are_counted():
    rows = RowAllocator(3)
    for _ in range(3):
        rows.acquire()
    rows.release(0, last_step=4)
    rows.release(1, last_step=-1)
    assert (rows.num_free, rows.num_retiring) == (1, 1)
    rows.executed(4)
    assert (rows.num_free, rows.num_retiring) == (2, 0)

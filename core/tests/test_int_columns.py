"""Integer columns: a single addition of Python integers increments all values."""

from array import array
from random import Random

import pytest

from dovetail.int_columns import all_below, increment


@pytest.mark.parametrize("typecode", ["i", "l", "q"])
@pytest.mark.parametrize("num", [0, 1, 2, 7, 300])
def test_increment_adds_one_to_the_first_values_of_a_column(typecode, num):
    source = Random(num)
    bits = 8 * array(typecode).itemsize - 1
    numbers = [source.randrange((1 << bits) - 1) for _ in range(num)] + [5, 6]
    for index in range(0, num, 3):
        numbers[index] = (1 << bits) - 2  # the largest value that can be incremented
    column = array(typecode, numbers)
    increment(memoryview(column), num)
    assert list(column) == [number + 1 for number in numbers[:num]] + [5, 6]


@pytest.mark.parametrize("limit", [1, 2, 32_000, 2**31 - 1, 2**31])
@pytest.mark.parametrize("num", [0, 1, 1023, 1024, 2050])
def test_all_below_rejects_negative_values_and_values_not_below_the_limit(num, limit):
    source = Random(num)
    fine = array("i", [source.choice([0, limit - 1, limit // 2]) for _ in range(num)])
    assert all_below(fine, limit)
    for invalid in {-1, -(2**31), limit, 2**31 - 1} - {2**31}:
        for index in {0, num // 2, num - 1} if num and not 0 <= invalid < limit else ():
            changed = fine[:]
            changed[index] = invalid
            assert not all_below(changed, limit), (invalid, index)

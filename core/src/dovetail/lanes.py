"""Columns of integers that move by one together, added to as one long number.

One addition, whatever their number, and none of the code of a library for arrays, which would have
to be fetched anew after each forward pass. Knows nothing of what is counted.
"""

from __future__ import annotations

import sys
from functools import lru_cache


def count_on(column: memoryview, num: int) -> None:
    """Add one to each of the first `num` integers of `column`, in place.

    column: writable, contiguous, of native integers, none negative and none the greatest of their
    size, so that none overflows into the next.
    """
    lanes = column[:num].cast("B")
    total = int.from_bytes(lanes, sys.byteorder) + _ones(num, column.itemsize)
    lanes[:] = total.to_bytes(len(lanes), sys.byteorder)


@lru_cache(maxsize=64)
def _ones(num: int, itemsize: int) -> int:
    return int.from_bytes((1).to_bytes(itemsize, sys.byteorder) * num, sys.byteorder)

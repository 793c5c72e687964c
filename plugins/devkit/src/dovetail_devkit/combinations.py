"""A selection of combinations of test parameters that is smaller than the full product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any


def third_of(*parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield one third of the combinations: those whose indices have a sum divisible by 3.

    Each combination of values of all parameters but one occurs if this one has at least 3 values,
    so a fault that needs certain values of two or more parameters is still found.
    """
    for indexed in product(*map(enumerate, parameters)):
        if sum(index for index, _ in indexed) % 3 == 0:
            yield tuple(value for _, value in indexed)

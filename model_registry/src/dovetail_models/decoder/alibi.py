"""The slopes of ALiBi. Source: Press et al. 2022, arXiv:2108.12409."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int, scale: float = 1.0) -> tuple[float, ...]:
    """Return the slopes of the paper, times `scale`.

    If the number of heads is not a power of two, the remaining heads get every second slope of the
    series for twice as many heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = _powers(power) + _powers(2 * power)[::2][: num_heads - power]
    return tuple(scale * slope for slope in slopes)


def mpt_slopes(num_heads: int, maximum: float) -> tuple[float, ...]:
    """Return the slopes of MPT: the series for the next power of two, odd indices first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = _powers(power, maximum)
    if power == num_heads:
        return tuple(slopes)
    return tuple((slopes[1::2] + slopes[::2])[:num_heads])


def _powers(count: int, maximum: float = 8.0) -> list[float]:
    return [2 ** (-maximum * number / count) for number in range(1, count + 1)]

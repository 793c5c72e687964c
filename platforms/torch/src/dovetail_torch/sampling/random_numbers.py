"""Stateless random numbers: one for each (seed, position), independent of the batch.

With a generator's state, a request's tokens would depend on its batch, on preemption and on the
pipeline depth. With a hash of seed and position they do not. This module does not depend on tensors
or devices: numbers are computed on the host, a few per step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return numbers in [0, 1), multiples of 2**-53, one for each (seed, position).

    The arrays have one dimension and equal length. Each seed's numbers are the SplitMix64 sequence
    (Steele, Lea, Flood 2014) that starts at the mixed seed, read at `positions`.
    """
    start = _mix(seeds + _GOLDEN)
    bits = _mix(start + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53

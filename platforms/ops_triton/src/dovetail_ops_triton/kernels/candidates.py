# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Compute statistics of a row of logits, and collect its candidates: tokens far above the mean.

Candidates are stored as sort keys, by column. See `cuts.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_ops_triton.kernels.order import (
    MINIMUM,
    column_of,
    image_in,
    image_of,
    number_of,
    sort_key_of,
)

_MAXIMUM = tl.constexpr(2**31 - 1)
_LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def survey(row_ptr, vocab_size, deviations, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr):
    """Return the image of the row's maximum, the mean of the finite logits, and a threshold.

    threshold: the lowest image of candidates. If there are few finite logits, all are candidates.
    """
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], MINIMUM, tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lanes < vocab_size
        x = tl.load(row_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, image_of(x))
        finite = tl.abs(x) < float("inf")
        x = tl.where(finite, x, 0.0)
        total += x
        squares += x * x
        count += finite.to(tl.int32)
    num_finite = tl.maximum(tl.sum(count, axis=0), 1)
    mean = tl.sum(total, axis=0) / num_finite
    variance = tl.maximum(tl.sum(squares, axis=0) / num_finite - mean * mean, 0.0)
    threshold = mean + deviations * tl.sqrt(variance)
    threshold = tl.where(num_finite <= CANDIDATES, _LOWEST_FINITE, threshold)
    return tl.max(best, axis=0), mean, image_of(threshold)


@triton.jit
def weigh(x, image, best, scale):
    """Return probabilities relative to that of the most likely token, from 0 to 1."""
    weight = tl.exp2((x - number_of(best)) * scale)
    # The most likely token has weight 1 even if its logit is infinite; NaN then has no weight.
    weight = tl.where(weight <= 1.0, weight, 0.0)
    return tl.where(image == best, 1.0, weight)


@triton.jit
def load(ptr, columns, inside, ARE_SORT_KEYS: tl.constexpr):
    """Return numbers, their images and their columns in the row."""
    if ARE_SORT_KEYS:
        sort_keys = tl.load(ptr + columns, mask=inside, other=0)
        image = image_in(sort_keys)
        x = number_of(image)
        columns = column_of(sort_keys).to(tl.int32)
    else:
        x = tl.load(ptr + columns, mask=inside, other=0.0).to(tl.float32)
        image = image_of(x)
    return x, tl.where(inside, image, MINIMUM), columns


@triton.jit
def collect(
    row_ptr,
    candidates_ptr,
    vocab_size,
    best,
    scale,
    log2_min_p,
    threshold,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Store the sort keys of the first CANDIDATES tokens from `threshold` on that min-p keeps.

    Return the lowest integer image, the number and the mass of all tokens that min-p keeps, and the
    number of candidates.
    """
    lanes = tl.arange(0, BLOCK)
    minimum = tl.full([BLOCK], _MAXIMUM, tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    num_candidates = best * 0
    for start in range(0, vocab_size, BLOCK):
        columns = start + lanes
        inside = columns < vocab_size
        x = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        image = image_of(x)
        likely = ((x - number_of(best)) * scale >= log2_min_p) | (image == best)
        stays = inside & likely
        minimum = tl.where(stays, tl.minimum(minimum, image), minimum)
        count += stays.to(tl.int32)
        mass += tl.where(stays, weigh(x, image, best, scale), 0.0)
        is_candidate = stays & (image >= threshold)
        places = num_candidates + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
        sort_keys = sort_key_of(image, columns)
        is_stored = is_candidate & (places < CANDIDATES)
        tl.store(candidates_ptr + places, sort_keys, mask=is_stored)
        num_candidates += tl.sum(is_candidate.to(tl.int32), axis=0)
    return (
        tl.min(minimum, axis=0),
        tl.sum(count, axis=0),
        tl.sum(mass, axis=0),
        num_candidates,
    )


@triton.jit
def mass_of(candidates_ptr, num_candidates, best, scale, CANDIDATES: tl.constexpr):
    """Return the mass of the candidates."""
    lanes = tl.arange(0, CANDIDATES)
    inside = lanes < num_candidates
    x, image, _ = load(candidates_ptr, lanes, inside, True)
    return tl.sum(tl.where(inside, weigh(x, image, best, scale), 0.0), axis=0)

# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Apply min-p, top-k and top-p to a row: find the lowest sort key of a kept token.

Tokens are ordered as in `order.py`: top-k keeps exactly k tokens; of these, top-p keeps the fewest
that reach its mass. Nothing is sorted. A search narrows an interval of integer images of logits:
the lower end keeps enough tokens, the upper end does not. A pass over the row counts and weighs the
tokens at or above three images in the interval, which reduces it to a quarter or less, and finds
the lowest and the highest image that occur. The search ends when one token or one image remains. Of
tokens with equal logits, the first are kept.

The row is read twice: for its maximum and its distribution, and to collect candidates, the tokens
far above the mean. If they contain all tokens that may be kept, which is usual, the search and the
draw read only the candidates. Otherwise they read the row. Sources: Nguyen et al. 2024 (min-p);
Fan, Lewis, Dauphin 2018 (top-k); Holtzman et al. 2020 (top-p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_ops_triton.kernels.order import (
    LOWEST,
    MINIMUM,
    column_of,
    image_in,
    image_of,
    number_of,
    sort_key_of,
)

_LOG2E = tl.constexpr(1.4426950408889634)
_MAXIMUM = tl.constexpr(2**31 - 1)
_LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)


# Columns with one number per row share a buffer, so the alignment of their addresses varies.
_COLUMNS = [
    "temperature_ptr",
    "top_k_ptr",
    "top_p_ptr",
    "min_p_ptr",
    "cuts_ptr",
    "counts_ptr",
    "candidates_ptr",
]


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def cuts_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    cuts_ptr,
    counts_ptr,
    candidates_ptr,
    row_stride,
    vocab_size,
    deviations,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Store the lowest sort key that is kept in one row, and the number of candidates.

    The number is 0 if the candidates do not contain all kept tokens. Otherwise their sort keys are
    stored, by column. deviations: the distance of candidates from the mean, in standard deviations.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    # Both branches of the `if` must have the same type.
    cut = tl.full([], LOWEST, tl.int64)
    num_candidates = tl.full([], 0, tl.int32)
    if (temperature > 0) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0)):
        row_ptr = logits_ptr + row * row_stride
        cut, num_candidates = _cut(
            row_ptr, candidates_ptr + row * CANDIDATES, vocab_size, _LOG2E / temperature, top_k,
            top_p, min_p, deviations, BLOCK, CANDIDATES,
        )  # fmt: skip
    tl.store(cuts_ptr + row, cut)
    tl.store(counts_ptr + row, num_candidates)


@triton.jit
def _cut(
    row_ptr,
    candidates_ptr,
    vocab_size,
    scale,
    top_k,
    top_p,
    min_p,
    deviations,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Return the lowest sort key that is kept, and the number of candidates or 0.

    scale: converts logits to powers of two.
    """
    best, mean, threshold = _survey(row_ptr, vocab_size, deviations, BLOCK, CANDIDATES)
    low, count, mass, num_candidates = _likely(
        row_ptr, candidates_ptr, vocab_size, best, scale, tl.log2(min_p), threshold, BLOCK,
        CANDIDATES,
    )  # fmt: skip
    mass_above = mass * 0.0
    if num_candidates <= CANDIDATES:
        tl.debug_barrier()  # other threads have stored the candidates
        mass_above = _mass_of(candidates_ptr, num_candidates, best, scale, CANDIDATES)
    has_mass = tl.where(top_p < 1, mass_above >= top_p * mass, num_candidates == count)
    is_enough = tl.where(top_k < count, num_candidates >= top_k, has_mass)
    if is_enough & (num_candidates > 0) & (num_candidates <= CANDIDATES):
        cut = _narrow(
            candidates_ptr, num_candidates, best, mean, scale, tl.maximum(low, threshold),
            num_candidates, mass_above, top_k, top_p, count, mass, CANDIDATES, True,
        )  # fmt: skip
    else:
        num_candidates *= 0
        cut = _narrow(
            row_ptr, vocab_size, best, mean, scale, low, count, mass, top_k, top_p, count, mass,
            CANDIDATES, False,
        )  # fmt: skip
    return cut, num_candidates


@triton.jit
def _narrow(
    ptr,
    size,
    best,
    mean,
    scale,
    low,
    count,
    mass,
    top_k,
    top_p,
    total_count,
    total_mass,
    BLOCK: tl.constexpr,
    ARE_SORT_KEYS: tl.constexpr,
):
    """Return the lowest sort key that top-k and top-p keep.

    ptr, size: the row, or the sort keys of candidates. low, count, mass: a lower limit of the
    images of its tokens that min-p keeps, and their number and mass. total_count, total_mass:
    number and mass of all tokens of the row that min-p keeps.
    """
    low, equals, count, mass = _search(
        ptr, size, best, mean, scale, low, _MAXIMUM, count, mass, top_k, 0.0, BLOCK, ARE_SORT_KEYS
    )
    if top_p < 1:
        wanted = top_p * tl.where(top_k < total_count, mass, total_mass)
        low, equals, count, mass = _search(
            ptr, size, best, mean, scale, low, equals, count, mass, 1, wanted, BLOCK, ARE_SORT_KEYS
        )
    sort_key = low.to(tl.int64) << 32
    if equals < _MAXIMUM:
        column = _column_of_equal(ptr, size, low, equals, BLOCK, ARE_SORT_KEYS)
        sort_key = sort_key_of(low, column)
    return sort_key


@triton.jit
def _survey(row_ptr, vocab_size, deviations, BLOCK: tl.constexpr, CANDIDATES: tl.constexpr):
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
def _weigh(x, image, best, scale):
    """Return probabilities relative to that of the most likely token, from 0 to 1."""
    weight = tl.exp2((x - number_of(best)) * scale)
    # The most likely token has weight 1 even if its logit is infinite; NaN then has no weight.
    weight = tl.where(weight <= 1.0, weight, 0.0)
    return tl.where(image == best, 1.0, weight)


@triton.jit
def _likely(
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
        mass += tl.where(stays, _weigh(x, image, best, scale), 0.0)
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
def _mass_of(candidates_ptr, num_candidates, best, scale, CANDIDATES: tl.constexpr):
    """Return the mass of the candidates."""
    lanes = tl.arange(0, CANDIDATES)
    inside = lanes < num_candidates
    x, image, _ = _load(candidates_ptr, lanes, inside, True)
    return tl.sum(tl.where(inside, _weigh(x, image, best, scale), 0.0), axis=0)


@triton.jit
def _search(
    ptr,
    size,
    best,
    mean,
    scale,
    low,
    equals,
    count,
    mass,
    wanted_count,
    wanted_mass,
    BLOCK: tl.constexpr,
    ARE_SORT_KEYS: tl.constexpr,
):
    """Return the highest image that keeps enough tokens, and the number of kept tokens with it.

    low, equals: the best image so far and the number of tokens with it. count, mass: count and mass
    of the kept tokens.
    Updated values of all four are returned.
    """
    first, first_equals = low, equals
    top = best
    count_above = count * 0
    mass_above = mass * 0.0
    # The first pass tests numbers evenly spaced between the lowest, or the mean, and the best.
    gap = (number_of(best) - tl.maximum(mean, number_of(low))) * 0.25
    a = image_of(number_of(best) - 3 * gap)
    b = image_of(number_of(best) - 2 * gap)
    c = image_of(number_of(best) - gap)
    while (low < top) & (count > wanted_count) & (count - count_above > 1):
        a = tl.minimum(tl.maximum(a, low + 1), top)
        b = tl.minimum(tl.maximum(b, low + 1), top)
        c = tl.minimum(tl.maximum(c, low + 1), top)
        lowest, highest, count_a, count_b, count_c, mass_a, mass_b, mass_c = _weigh_above(
            ptr, size, best, scale, low, top, a, b, c, BLOCK, ARE_SORT_KEYS
        )
        a_does = (count_a >= wanted_count) & (mass_a >= wanted_mass)
        b_does = (count_b >= wanted_count) & (mass_b >= wanted_mass)
        c_does = (count_c >= wanted_count) & (mass_c >= wanted_mass)
        low = tl.where(c_does, c, tl.where(b_does, b, tl.where(a_does, a, lowest)))
        count = tl.where(
            c_does, count_c, tl.where(b_does, count_b, tl.where(a_does, count_a, count))
        )
        mass = tl.where(c_does, mass_c, tl.where(b_does, mass_b, tl.where(a_does, mass_a, mass)))
        count_above = tl.where(
            a_does, tl.where(b_does, tl.where(c_does, count_above, count_c), count_b), count_a
        )
        mass_above = tl.where(
            a_does, tl.where(b_does, tl.where(c_does, mass_above, mass_c), mass_b), mass_a
        )
        top = tl.where(a_does, tl.where(b_does, tl.where(c_does, highest, c - 1), b - 1), a - 1)
        top = tl.minimum(top, highest)
        quarter = (top >> 2) - (low >> 2)  # the distance of the images may overflow int32
        a = low + quarter
        b = a + quarter
        c = top - quarter
    equals = tl.where(low == first, first_equals, _MAXIMUM)
    if (count > wanted_count) & (count - count_above > 1):
        # Only equal tokens remain: keep as many as needed.
        weight = _weigh(number_of(low), low, best, scale)
        missing = tl.minimum(tl.maximum((wanted_mass - mass_above) / weight, 1.0), 1e9)
        equals = tl.maximum(tl.ceil(missing).to(tl.int32), wanted_count - count_above)
        equals = tl.minimum(equals, count - count_above)
        count = count_above + equals
        mass = mass_above + equals * weight
    return low, equals, count, mass


@triton.jit
def _load(ptr, columns, inside, ARE_SORT_KEYS: tl.constexpr):
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
def _weigh_above(
    ptr,
    size,
    best,
    scale,
    low,
    top,
    a,
    b,
    c,
    BLOCK: tl.constexpr,
    ARE_SORT_KEYS: tl.constexpr,
):
    """Return the lowest and highest integer image from low to top, then counts and masses.

    There are three counts of tokens, at or above a, b and c, then the three masses of these tokens.
    """
    lanes = tl.arange(0, BLOCK)
    lowest = tl.full([BLOCK], _MAXIMUM, tl.int32)
    highest = tl.full([BLOCK], MINIMUM, tl.int32)
    count_a = tl.zeros([BLOCK], tl.int32)
    count_b = tl.zeros([BLOCK], tl.int32)
    count_c = tl.zeros([BLOCK], tl.int32)
    mass_a = tl.zeros([BLOCK], tl.float32)
    mass_b = tl.zeros([BLOCK], tl.float32)
    mass_c = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        x, image, _ = _load(ptr, start + lanes, start + lanes < size, ARE_SORT_KEYS)
        weight = _weigh(x, image, best, scale)
        lowest = tl.where(image >= low, tl.minimum(lowest, image), lowest)
        highest = tl.where(image <= top, tl.maximum(highest, image), highest)
        count_a += (image >= a).to(tl.int32)
        count_b += (image >= b).to(tl.int32)
        count_c += (image >= c).to(tl.int32)
        mass_a += tl.where(image >= a, weight, 0.0)
        mass_b += tl.where(image >= b, weight, 0.0)
        mass_c += tl.where(image >= c, weight, 0.0)
    return (
        tl.min(lowest, axis=0),
        tl.max(highest, axis=0),
        tl.sum(count_a, axis=0),
        tl.sum(count_b, axis=0),
        tl.sum(count_c, axis=0),
        tl.sum(mass_a, axis=0),
        tl.sum(mass_b, axis=0),
        tl.sum(mass_c, axis=0),
    )


@triton.jit
def _column_of_equal(ptr, size, image, number, BLOCK: tl.constexpr, ARE_SORT_KEYS: tl.constexpr):
    """Return the column of the `number`-th token with this integer image, counted from 1."""
    lanes = tl.arange(0, BLOCK)
    result = tl.zeros([BLOCK], tl.int32)
    num_seen = number * 0
    for start in range(0, size, BLOCK):
        _, images, columns = _load(ptr, start + lanes, start + lanes < size, ARE_SORT_KEYS)
        same = (images == image).to(tl.int32)
        is_it = (same > 0) & (num_seen + tl.cumsum(same, axis=0) == number)
        result = tl.where(is_it, columns, result)
        num_seen += tl.sum(same, axis=0)
    return tl.max(result, axis=0)

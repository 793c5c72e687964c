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

from dovetail_ops_triton.kernels.candidates import collect, load, mass_of, survey, weigh
from dovetail_ops_triton.kernels.order import LOWEST, MINIMUM, image_of, number_of, sort_key_of

_LOG2E = tl.constexpr(1.4426950408889634)
_MAXIMUM = tl.constexpr(2**31 - 1)


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
    best, mean, threshold = survey(row_ptr, vocab_size, deviations, BLOCK, CANDIDATES)
    low, count, mass, num_candidates = collect(
        row_ptr, candidates_ptr, vocab_size, best, scale, tl.log2(min_p), threshold, BLOCK,
        CANDIDATES,
    )  # fmt: skip
    mass_above = mass * 0.0
    if num_candidates <= CANDIDATES:
        tl.debug_barrier()  # other threads have stored the candidates
        mass_above = mass_of(candidates_ptr, num_candidates, best, scale, CANDIDATES)
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
        weight = weigh(number_of(low), low, best, scale)
        missing = tl.minimum(tl.maximum((wanted_mass - mass_above) / weight, 1.0), 1e9)
        equals = tl.maximum(tl.ceil(missing).to(tl.int32), wanted_count - count_above)
        equals = tl.minimum(equals, count - count_above)
        count = count_above + equals
        mass = mass_above + equals * weight
    return low, equals, count, mass


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
        x, image, _ = load(ptr, start + lanes, start + lanes < size, ARE_SORT_KEYS)
        weight = weigh(x, image, best, scale)
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
        _, images, columns = load(ptr, start + lanes, start + lanes < size, ARE_SORT_KEYS)
        same = (images == image).to(tl.int32)
        is_it = (same > 0) & (num_seen + tl.cumsum(same, axis=0) == number)
        result = tl.where(is_it, columns, result)
        num_seen += tl.sum(same, axis=0)
    return tl.max(result, axis=0)

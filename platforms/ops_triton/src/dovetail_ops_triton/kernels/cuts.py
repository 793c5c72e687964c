# ruff: noqa: ANN001, ANN201, ANN202  # annotations of kernels are read by Triton
"""Apply min-p, top-k and top-p to a row: find the lowest sort key of a kept token.

Tokens are ordered as in `order.py`: top-k keeps exactly k tokens; of these, top-p keeps the fewest
that reach its mass. Nothing is sorted. A search narrows an interval of integer images of logits:
the lower end keeps enough tokens, the upper end does not. A pass over the row counts and weighs the
tokens at or above three images in the interval, which reduces it to a quarter or less, and finds
the lowest and the highest image that occur. The search ends when one token or one image remains. Of
tokens with equal logits, the first are kept. Sources: Nguyen et al. 2024 (min-p); Fan, Lewis,
Dauphin 2018 (top-k); Holtzman et al. 2020 (top-p).
"""

from __future__ import annotations

import triton
import triton.language as tl

from dovetail_ops_triton.kernels.order import LOWEST, MINIMUM, image_of, number_of, sort_key_of

_LOG2E = tl.constexpr(1.4426950408889634)
_MAXIMUM = tl.constexpr(2**31 - 1)


# Columns with one number per row share a buffer, so the alignment of their addresses varies.
_COLUMNS = ["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "cuts_ptr"]


@triton.jit(do_not_specialize_on_alignment=_COLUMNS)
def cuts_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    cuts_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Store the lowest sort key that is kept in one row."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    # Both branches of the `if` must have the same type.
    cut = tl.full([], LOWEST, tl.int64)
    if (temperature > 0) & ((top_k < vocab_size) | (top_p < 1) | (min_p > 0)):
        row_ptr = logits_ptr + row * row_stride
        cut = _cut(row_ptr, vocab_size, _LOG2E / temperature, top_k, top_p, min_p, BLOCK)
    tl.store(cuts_ptr + row, cut)


@triton.jit
def _cut(row_ptr, vocab_size, scale, top_k, top_p, min_p, BLOCK: tl.constexpr):
    """Return the lowest sort key that is kept. scale: converts logits to powers of two."""
    best, mean = _survey(row_ptr, vocab_size, BLOCK)
    low, count, mass = _likely(row_ptr, vocab_size, best, scale, tl.log2(min_p), BLOCK)
    low, equals, count, mass = _search(
        row_ptr, vocab_size, best, mean, scale, low, _MAXIMUM, count, mass, top_k, 0.0, BLOCK
    )
    if top_p < 1:
        low, equals, count, mass = _search(
            row_ptr, vocab_size, best, mean, scale, low, equals, count, mass, 1, top_p * mass, BLOCK
        )
    sort_key = low.to(tl.int64) << 32
    if equals < _MAXIMUM:
        sort_key = sort_key_of(low, _column_of_equal(row_ptr, vocab_size, low, equals, BLOCK))
    return sort_key


@triton.jit
def _survey(row_ptr, vocab_size, BLOCK: tl.constexpr):
    """Return the integer image of the row's maximum, and the mean of the finite logits."""
    lanes = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], MINIMUM, tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lanes < vocab_size
        x = tl.load(row_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, image_of(x))
        finite = tl.abs(x) < float("inf")
        total += tl.where(finite, x, 0.0)
        count += finite.to(tl.int32)
    num_finite = tl.maximum(tl.sum(count, axis=0), 1)
    return tl.max(best, axis=0), tl.sum(total, axis=0) / num_finite


@triton.jit
def _weigh(x, image, best, scale):
    """Return probabilities relative to that of the most likely token, from 0 to 1."""
    weight = tl.exp2((x - number_of(best)) * scale)
    # The most likely token has weight 1 even if its logit is infinite; NaN then has no weight.
    weight = tl.where(weight <= 1.0, weight, 0.0)
    return tl.where(image == best, 1.0, weight)


@triton.jit
def _likely(row_ptr, vocab_size, best, scale, log2_min_p, BLOCK: tl.constexpr):
    """Return the lowest integer image, the number and the mass of the tokens that min-p keeps."""
    lanes = tl.arange(0, BLOCK)
    minimum = tl.full([BLOCK], _MAXIMUM, tl.int32)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        inside = start + lanes < vocab_size
        x = tl.load(row_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        image = image_of(x)
        likely = ((x - number_of(best)) * scale >= log2_min_p) | (image == best)
        stays = inside & likely
        minimum = tl.where(stays, tl.minimum(minimum, image), minimum)
        count += stays.to(tl.int32)
        mass += tl.where(stays, _weigh(x, image, best, scale), 0.0)
    return tl.min(minimum, axis=0), tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _search(
    row_ptr,
    vocab_size,
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
            row_ptr, vocab_size, best, scale, low, top, a, b, c, BLOCK
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
def _weigh_above(row_ptr, vocab_size, best, scale, low, top, a, b, c, BLOCK: tl.constexpr):
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
    for start in range(0, vocab_size, BLOCK):
        inside = start + lanes < vocab_size
        x = tl.load(row_ptr + start + lanes, mask=inside, other=0.0).to(tl.float32)
        image = tl.where(inside, image_of(x), MINIMUM)
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
def _column_of_equal(row_ptr, vocab_size, image, number, BLOCK: tl.constexpr):
    """Return the column of the `number`-th token with this integer image, counted from 1."""
    lanes = tl.arange(0, BLOCK)
    result = tl.zeros([BLOCK], tl.int32)
    num_seen = number * 0
    for start in range(0, vocab_size, BLOCK):
        columns = start + lanes
        inside = columns < vocab_size
        x = tl.load(row_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        same = (inside & (image_of(x) == image)).to(tl.int32)
        is_it = (same > 0) & (num_seen + tl.cumsum(same, axis=0) == number)
        result = tl.where(is_it, columns, result)
        num_seen += tl.sum(same, axis=0)
    return tl.max(result, axis=0)

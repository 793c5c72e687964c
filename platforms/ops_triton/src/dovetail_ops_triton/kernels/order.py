# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""One order for numbers and columns: the greater number first, the lower column among equals.

A float32 number has an int32 image that preserves the order. Image and column together form an
int64 place, which is unique within a row. With it argmax, top-k and top-p become searches over
unique integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-(2**31))
"""An image that is lower than the image of every number."""
LOWEST = tl.constexpr(-(2**63))
"""A place that is lower than the place of every column."""
NAN = tl.constexpr(2**31 - 2)
"""The image of NaN: above all numbers, but not the greatest int32."""


@triton.jit
def image_of(x):
    """Return the images of float32 numbers; both zeros have the same image."""
    bits = x.to(tl.int32, bitcast=True)
    image = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    image = tl.where(x == 0.0, 0, image)
    return tl.where(x == x, image, NAN)


@triton.jit
def number_of(image):
    """Return the float32 numbers that have these images."""
    bits = image ^ ((image >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def place_of(image, columns):
    """Return places in the order, int64; the best column has the greatest place."""
    return (image.to(tl.int64) << 32) | (0xFFFFFFFF - columns.to(tl.int64))


@triton.jit
def column_of(place):
    """Return the column of a place, int64."""
    return 0xFFFFFFFF - (place & 0xFFFFFFFF)

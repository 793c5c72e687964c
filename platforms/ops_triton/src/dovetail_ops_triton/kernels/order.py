# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Sort keys for the columns of a row: first by greater number, then by lower column.

A float32 number has an int32 image that preserves the order. The image and the column form an int64
sort key, which is unique within a row. So argmax, top-k and top-p are searches over unique
integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

MINIMUM = tl.constexpr(-(2**31))
"""An integer key that is lower than the key of every number."""
LOWEST = tl.constexpr(-(2**63))
"""A sort key that is lower than the sort key of every column."""
NAN = tl.constexpr(2**31 - 2)
"""The integer key of NaN: greater than the key of every number, but not the greatest int32."""


@triton.jit
def image_of(x):
    """Return the int32 images of float32 numbers. Both zeros have the same image."""
    bits = x.to(tl.int32, bitcast=True)
    image = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    image = tl.where(x == 0.0, 0, image)
    return tl.where(x == x, image, NAN)


@triton.jit
def number_of(image):
    """Return the float32 numbers that have these int32 images."""
    bits = image ^ ((image >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sort_key_of(image, columns):
    """Return int64 sort keys. The column with the greatest number has the greatest sort key."""
    return (image.to(tl.int64) << 32) | (0xFFFFFFFF - columns.to(tl.int64))


@triton.jit
def image_in(sort_key):
    """Return the int32 image that a sort key contains."""
    return (sort_key >> 32).to(tl.int32)


@triton.jit
def column_of(sort_key):
    """Return the column that a sort key contains, int64."""
    return 0xFFFFFFFF - (sort_key & 0xFFFFFFFF)

# ruff: noqa: ANN001, ANN201  # annotations of kernels are read by Triton
"""Numeric functions that several kernels use, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """Return x · sigmoid(x)."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu_tanh(x):
    """Return GELU by tanh, which is x · sigmoid(2 · sqrt(2 / pi) · (x + 0.044715 · x³))."""
    return x * sigmoid(1.5957691216 * x * (1.0 + 0.044715 * x * x))


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)).

    With e = exp(-|x|) and s = e / (2 + e) ≤ 1/3, log(1 + e) is 2 · artanh(s). The relative error of
    its series is small, also where 1 + e is rounded to 1.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    sum_ = 1.0 / 15.0
    for odd in tl.static_range(13, -1, -2):
        sum_ = sum_ * square + 1.0 / odd
    return tl.maximum(x, 0.0) + 2.0 * s * sum_


@triton.jit
def one_minus_exp(x):
    """Return 1 - exp(x) for x ≤ 0, with a small relative error.

    Near 0, it is the sum of a series, because 1 - exp(x) would have few correct digits.
    """
    sum_ = 1.0 / 8.0
    for index in tl.static_range(7, 0, -1):
        sum_ = (1.0 + x * sum_) * (1.0 / index)
    return tl.where(x > -0.25, -x * sum_, 1.0 - tl.exp(x))

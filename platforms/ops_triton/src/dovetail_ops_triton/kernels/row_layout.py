"""The memory layout of a tensor's rows, as passed to kernels.

Dimensions: D features of the last dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.errors import ContractError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of inputs and outputs; all kernels compute in float32."""


class RowLayout(NamedTuple):
    """The rows of a tensor: num_rows // num_inner groups of num_inner rows.

    Row i begins at i // num_inner · outer_stride + i % num_inner · inner_stride.
    tensor: keeps the memory alive; it is the given tensor, or a copy if its layout is unsupported.
    """

    tensor: torch.Tensor
    num_rows: int
    num_inner: int
    outer_stride: int
    inner_stride: int


def row_layout(x_D: torch.Tensor) -> RowLayout:
    """Return the layout of the rows of `x_D`, which may have any leading dimensions.

    Raises ContractError for a dtype that the kernels do not support.
    """
    if x_D.dtype not in DTYPES:
        known = ", ".join(str(dtype) for dtype in DTYPES)
        raise ContractError(
            f"the ops 'triton' received {x_D.dtype}; they support {known}: run the model in "
            "one of those dtypes, or choose the ops 'torch'"
        )
    if x_D.stride(-1) != 1:
        x_D = x_D.contiguous()
    if x_D.dim() == 3:
        num_outer, num_inner, _ = x_D.shape
        return RowLayout(x_D, num_outer * num_inner, num_inner, x_D.stride(0), x_D.stride(1))
    if x_D.dim() != 2:
        x_D = x_D.reshape(-1, x_D.shape[-1])
    return RowLayout(x_D, x_D.shape[0], 1, x_D.stride(0), 0)

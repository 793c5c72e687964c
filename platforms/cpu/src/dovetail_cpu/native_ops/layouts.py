"""Which tensors the native kernels support: they do not check addresses, sizes and dtypes.

A call with other tensors uses torch, which supports them or raises an error that names the sizes.
"""

from __future__ import annotations

import torch

NUMBERS = (torch.bfloat16, torch.float32)
"""The dtypes of operations that have a kernel for both."""


def has_rows(x: torch.Tensor, num_dims: int = 2) -> bool:
    """Return whether x is bfloat16 with this number of dimensions and contiguous rows."""
    return x.dtype == torch.bfloat16 and x.dim() == num_dims and x.stride(-1) == 1


def have_equal_rows(*tensors: torch.Tensor) -> bool:
    """Return whether all are bfloat16 matrices of one shape with contiguous rows."""
    return all(has_rows(x) and x.shape == tensors[0].shape for x in tensors)


def is_changeable(x: torch.Tensor) -> bool:
    """Return whether x is a matrix of NUMBERS with contiguous rows that share no memory."""
    is_matrix = x.dtype in NUMBERS and x.dim() == 2 and x.stride(1) == 1
    return is_matrix and (len(x) < 2 or x.stride(0) >= x.shape[1])


def is_vector(x: torch.Tensor | None, size: int, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Return whether x is None or has `size` contiguous numbers of the dtype."""
    return x is None or (x.shape == (size,) and x.dtype == dtype and x.is_contiguous())


def is_rotary(
    positions_T: torch.Tensor, cos_sin_PR: torch.Tensor, num_tokens: int, head_size: int
) -> bool:
    """Return whether the kernel supports these positions and factors for heads of this size."""
    num_features = cos_sin_PR.shape[-1]
    return (
        is_vector(positions_T, num_tokens, torch.int64)
        and cos_sin_PR.dtype == torch.float32
        and cos_sin_PR.dim() == 2
        and cos_sin_PR.is_contiguous()
        and num_features <= head_size
        and num_features % 2 == 0
    )

"""The fp8 dtypes of a cache: their torch types, and the conversion of keys and values.

Dimensions: T tokens, K key-value heads, D head size.
"""

from __future__ import annotations

import torch

from dovetail.interfaces.kv_cache import FullAttentionSpec

FP8_TYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def cache_type(spec: FullAttentionSpec) -> torch.dtype:
    """Return the torch dtype of a cache."""
    result: torch.dtype = FP8_TYPES.get(spec.dtype) or getattr(torch, spec.dtype)
    return result


def to_fp8(x_TKD: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return x / scale in an fp8 dtype, clamped to its largest numbers. NaN stays NaN.

    scale: float32, on the device of x; None for 1.
    """
    largest = torch.finfo(dtype).max
    scaled = x_TKD.float() if scale is None else x_TKD.float() / scale
    return scaled.clamp(-largest, largest).to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return `x`, or its bytes if it is fp8: not all devices can assign fp8 values by index."""
    return x.view(torch.uint8) if x.dtype in FP8_TYPES.values() else x

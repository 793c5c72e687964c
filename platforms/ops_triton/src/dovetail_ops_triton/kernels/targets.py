"""Launch properties of matrix product kernels that differ between targets.

This module imports Triton.
"""

from __future__ import annotations

from functools import cache

import torch
import triton.language as tl

from dovetail_ops_triton.availability import INTERPRETED

AMD_STAGES = 2
"""Pipeline stages on AMD's and Intel's devices."""

_COMPUTE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def compute_type(dtype: torch.dtype) -> tl.dtype:
    """Return the dtype of operands: the model's, or float32 in the interpreter.

    The interpreter has no bfloat16 arithmetic.
    """
    return tl.float32 if INTERPRETED else _COMPUTE[dtype]


@cache
def _is_nvidia(device_type: str) -> bool:
    return device_type == "cuda" and not torch.version.hip


def precision_of(device_type: str) -> str:
    """Return the `input_precision` of products of float32 numbers.

    NVIDIA's matrix units have no float32: three products of tf32 numbers have almost its precision.
    AMD's have float32.
    """
    return "tf32x3" if _is_nvidia(device_type) else "ieee"


def stages_for(device_type: str, num_stages: int) -> int:
    """Return `num_stages`, or fewer for devices whose thread blocks have 64 KiB of local memory."""
    return num_stages if _is_nvidia(device_type) else min(num_stages, AMD_STAGES)

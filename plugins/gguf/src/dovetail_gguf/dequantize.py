"""Computes the float32 values of quantized blocks with the package `gguf`.

For every type, the results are equal to those of that package.
"""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from dovetail_gguf.tensor_types import TensorType

_PLAIN = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}
_CHUNK_VALUES = 1 << 15
"""Number of values that are dequantized in one call. It is small, so the values stay in the
processor's cache, and torch converts them in the calling thread."""


def plain_tensor(memory: memoryview, type_: TensorType, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of values that are stored one by one. It must not be written to."""
    return torch.frombuffer(memory, dtype=_PLAIN[type_.name]).view(shape)


def dequantize(
    blocks_OB: torch.Tensor, type_: TensorType, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the values of rows of blocks: uint8 [O, bytes] to [O, I].

    dtype: the result dtype; float32 values are rounded to it. Only a few rows at a time are stored
    as float32.
    """
    kind = GGMLQuantizationType(type_.number)
    row_values = blocks_OB.shape[1] // type_.num_bytes * type_.num_values
    parts = []
    for chunk in blocks_OB.split(max(1, _CHUNK_VALUES // max(1, row_values))):
        with np.errstate(all="ignore"):  # a damaged file may have infinite scales
            values = gguf_dequantize(chunk.numpy(), kind)
        parts.append(torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts)

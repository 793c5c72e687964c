"""Values of quantized blocks, as float32.

The package `gguf` computes them; results are equal to its own for every type.
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


def plain_tensor(memory: memoryview, type_: TensorType, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a view of values that are stored one by one; it must not be written to."""
    return torch.frombuffer(memory, dtype=_PLAIN[type_.name]).view(shape)


def dequantize(blocks_OB: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """Return the values of rows of blocks: uint8 [O, bytes] to float32 [O, I]."""
    kind = GGMLQuantizationType(type_.number)
    with np.errstate(all="ignore"):  # a damaged file may have infinite scales
        values = gguf_dequantize(blocks_OB.numpy(), kind)
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

"""Computes the float32 values of quantized blocks.

For every type, the results are equal to those of the package `gguf`. The package is imported only
for types other than Q8_0, because its import takes long.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

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
"""Number of values that are dequantized in one call. With so few values, they stay in the
processor's cache, and torch uses only the calling thread."""


def plain_tensor(memory: memoryview, type_: TensorType, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a read-only view of unquantized values as a tensor."""
    return torch.frombuffer(memory, dtype=_PLAIN[type_.name]).view(shape)


def dequantize(
    blocks_OB: torch.Tensor,
    type_: TensorType,
    dtype: torch.dtype = torch.float32,
    *,
    out_OI: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantize rows of blocks: uint8 [O, bytes] to values [O, I].

    dtype: the result dtype; float32 values are rounded to it. Only a few rows at a time are stored
    as float32. out_OI: memory for the result, with its own dtype; None to allocate it.
    """
    row_values = blocks_OB.shape[1] // type_.num_bytes * type_.num_values
    num_rows = max(1, _CHUNK_VALUES // max(1, row_values))
    values_of = _values_of_q8_0 if type_.name == "Q8_0" else _dequantizer(type_)
    result_OI = out_OI
    if result_OI is None:
        result_OI = torch.empty(len(blocks_OB), row_values, dtype=dtype)
    for chunk, part in zip(blocks_OB.split(num_rows), result_OI.split(num_rows), strict=True):
        part.copy_(values_of(chunk).view(part.shape))
    return result_OI


def _values_of_q8_0(blocks_OB: torch.Tensor) -> torch.Tensor:
    """Dequantize Q8_0 (a float16 scale and 32 int8 codes per block) without the package `gguf`."""
    blocks_NB = blocks_OB.reshape(-1, 34)
    scales_N1 = blocks_NB[:, :2].contiguous().view(torch.float16)
    return blocks_NB[:, 2:].view(torch.int8).float().mul_(scales_N1.float())


def _dequantizer(type_: TensorType) -> Callable[[torch.Tensor], torch.Tensor]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    kind = GGMLQuantizationType(type_.number)

    def values_of(blocks_OB: torch.Tensor) -> torch.Tensor:
        with np.errstate(all="ignore"):  # a damaged file may have infinite scales
            values = gguf_dequantize(blocks_OB.numpy(), kind)
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

    return values_of

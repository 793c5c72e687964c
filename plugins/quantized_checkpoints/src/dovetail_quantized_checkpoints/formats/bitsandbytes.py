"""bitsandbytes: 4-bit codes (nf4, fp4) with one absmax per block, or int8 with one per row.

4 bits: weight is uint8, two codes in a byte, the high four bits first, or the same bytes in another
dtype. Blocks are consecutive values of the flattened weight. weight.absmax: float32 [B]. With
double quantization, absmax is uint8 [B]: indices into weight.nested_quant_map [256], whose values
are multiplied by weight.nested_absmax. weight.quant_map: the values of the 16 codes.
weight.quant_state.bitsandbytes__nf4: JSON with the shape and the block sizes. 8 bits: weight is
int8 [O, I]; SCB: the largest magnitude of each row.
Source: Dettmers et al. 2023, arXiv:2305.14314, and 2022, arXiv:2208.07339.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dovetail.errors import WeightError
from dovetail.value_checks import shorten
from dovetail_quantized_checkpoints.formats.base import Format, ModuleTensors, Read, choice
from dovetail_quantized_checkpoints.stored_weight import StoredWeight

KINDS = ("nf4", "fp4")
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_STATE_BYTES = 1 << 14
MAX_SIZE = 1 << 31
_STATE = "weight.quant_state.bitsandbytes__"
_PREFIX = "weight."
_ITEM_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}
"""The dtypes as which tools store the packed codes."""
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_UNIT = 7.874015718698502e-3
"""1 / 127, as the library rounds it."""
_ROW_FORMAT = 0


@dataclass(frozen=True, kw_only=True)
class BlockState:
    """The quant_state of a 4-bit weight. shape: (O, I).

    nested_size: how many maxima share one nested maximum; 0 if maxima are not quantized.
    """

    shape: tuple[int, int]
    block_size: int
    dtype: torch.dtype
    nested_size: int
    nested_offset: float


@dataclass(frozen=True, kw_only=True)
class BlockedWeight(StoredWeight):
    """W[n] = table[code[n]] · maximum[n // block_size] of the flattened weight.

    codes: uint8, two in a byte. table: float32 [16]. maxima: float32 [B]. dtype: the dtype of the
    values.
    """

    shape: tuple[int, int]
    codes: torch.Tensor
    table: torch.Tensor
    maxima: torch.Tensor
    block_size: int
    dtype: torch.dtype

    def values(self, rows: slice) -> torch.Tensor:
        """Return the values of some rows, computed in float32 and rounded to `dtype`."""
        num_columns = self.shape[1]
        start, end = rows.start * num_columns, min(rows.stop, self.shape[0]) * num_columns
        packed = self.codes[start // 2 : -(-end // 2)]
        codes = torch.stack((packed >> 4, packed & 15), dim=-1).flatten()
        codes = codes[start % 2 : start % 2 + end - start]
        blocks = torch.arange(start, end) // self.block_size
        values = self.table[codes.long()] * self.maxima[blocks]
        return values.view(-1, num_columns).to(self.dtype)


@dataclass(frozen=True, kw_only=True)
class RowWeight(StoredWeight):
    """W[o, i] = code[o, i] · maximum[o] / 127. codes: int8 [O, I]. maxima: float32 [O]."""

    shape: tuple[int, int]
    codes: torch.Tensor
    maxima: torch.Tensor

    def values(self, rows: slice) -> torch.Tensor:
        """Return the values of some rows, float32."""
        return self.codes[rows] * self.maxima[rows, None] * _UNIT


class BitsAndBytes(Format):
    """Reads bitsandbytes checkpoints without the package."""

    marks: ClassVar[tuple[str, ...]] = (*(f".{_STATE}{kind}" for kind in KINDS), ".SCB")
    leaves: ClassVar[frozenset[str]] = frozenset(
        {
            "weight",
            "SCB",
            "weight_format",
            "weight.absmax",
            "weight.quant_map",
            "weight.nested_absmax",
            "weight.nested_quant_map",
            *(f"{_STATE}{kind}" for kind in KINDS),
        }
    )

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check the fields of `quantization_config`."""
        is_4bit = choice(table, "load_in_4bit", (True, False), False)
        is_8bit = choice(table, "load_in_8bit", (True, False), False)
        if is_4bit == is_8bit:
            raise WeightError(
                "quantization_config: one of load_in_4bit and load_in_8bit must be true; they "
                f"are {is_4bit} and {is_8bit}. Use another checkpoint of the model"
            )
        self._kind: str = choice(table, "bnb_4bit_quant_type", KINDS, "fp4") if is_4bit else ""

    def split(self, name: str) -> tuple[str, str] | None:
        """Split the name of a tensor into the module and the leaf, such as "weight.absmax"."""
        for leaf in self.leaves:
            if name.endswith(f".{leaf}"):
                return name.removesuffix(leaf), leaf
        return None

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        """Return (O, I)."""
        has_rows = "SCB" in module.entries
        if has_rows == bool(self._kind):
            raise module.error(
                f"has codes of {8 if has_rows else 4} bits, but quantization_config states "
                f"load_in_{4 if has_rows else 8}bit",
                "weight",
            )
        if has_rows:
            return self._shape_of_rows(module, read)
        return self._state(module, read).shape

    def _shape_of_rows(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        num_outputs, num_inputs = module.entry("weight", ("I8",), num_dims=2).shape
        module.entry("SCB", ("F32",), num_dims=1)
        module.expect_shape("SCB", (num_outputs,))
        if "weight_format" in module.entries:
            entry = module.entry("weight_format", ("U8",))
            if math.prod(entry.shape) != 1 or int(read(entry.name)) != _ROW_FORMAT:
                raise module.error("has codes that are not in row order", "weight_format")
        if not num_outputs * num_inputs:
            raise module.error("is empty", "weight")
        return num_outputs, num_inputs

    def _state(self, module: ModuleTensors, read: Read) -> BlockState:
        """Return the quant_state of a weight. Raise WeightError if its tensors contradict it."""
        leaf = f"{_STATE}{self._kind}"
        entry = module.entry(leaf, ("U8",), num_dims=1)
        if entry.shape[0] > MAX_STATE_BYTES:
            raise module.error(f"has {entry.shape[0]} bytes of JSON", leaf)
        state = _parse_state(module, leaf, self._kind, bytes(read(entry.name).tolist()))
        num_values = math.prod(state.shape)
        weight = module.entry("weight", tuple(_ITEM_BYTES))
        num_bytes = math.prod(weight.shape) * _ITEM_BYTES[weight.dtype]
        unit = _ITEM_BYTES[weight.dtype]
        if num_bytes != -(-num_values // (2 * unit)) * unit:
            raise module.error(
                f"has {num_bytes} bytes for the shape {list(state.shape)} that {leaf} states",
                "weight",
            )
        num_blocks = -(-num_values // state.block_size)
        is_nested = bool(state.nested_size)
        module.entry("weight.absmax", ("U8",) if is_nested else ("F32",), num_dims=1)
        module.expect_shape("weight.absmax", (num_blocks,))
        module.entry("weight.quant_map", ("F32",), num_dims=1)
        module.expect_shape("weight.quant_map", (16,))
        if is_nested:
            module.entry("weight.nested_absmax", ("F32",), num_dims=1)
            module.expect_shape("weight.nested_absmax", (-(-num_blocks // state.nested_size),))
            module.entry("weight.nested_quant_map", ("F32",), num_dims=1)
            module.expect_shape("weight.nested_quant_map", (256,))
        return state

    def open(self, module: ModuleTensors, read: Read) -> StoredWeight:
        """Return the weight."""
        shape = self.shape(module, read)

        def tensor(leaf: str) -> torch.Tensor:
            return read(f"{module.prefix}{leaf}")

        if "SCB" in module.entries:
            return RowWeight(shape=shape, codes=tensor("weight"), maxima=tensor("SCB"))
        state = self._state(module, read)
        maxima = tensor("weight.absmax")
        if state.nested_size:
            blocks = torch.arange(len(maxima)) // state.nested_size
            table = tensor("weight.nested_quant_map")
            maxima = table[maxima.long()] * tensor("weight.nested_absmax")[blocks]
            maxima = maxima + state.nested_offset
        return BlockedWeight(
            shape=shape,
            codes=tensor("weight").reshape(-1).view(torch.uint8),
            table=tensor("weight.quant_map"),
            maxima=maxima,
            block_size=state.block_size,
            dtype=state.dtype,
        )


def _parse_state(module: ModuleTensors, leaf: str, kind: str, text: bytes) -> BlockState:
    try:
        stated = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise module.error("is not valid JSON", leaf) from None
    if not isinstance(stated, dict):
        raise module.error("is not a JSON object", leaf)

    def value(field: str, is_valid: bool) -> Any:
        if not is_valid:
            raise module.error(f"states {field} {shorten(stated.get(field))}", leaf)
        return stated.get(field)

    shape = stated.get("shape")
    is_matrix = isinstance(shape, list) and len(shape) == 2
    is_matrix = is_matrix and all(type(size) is int and 0 < size < MAX_SIZE for size in shape)
    size, dtype = stated.get("blocksize"), stated.get("dtype")
    value("shape", is_matrix)
    value("quant_type", stated.get("quant_type") == kind)
    value("blocksize", type(size) is int and size in BLOCK_SIZES)
    value("dtype", isinstance(dtype, str) and dtype in _DTYPES)
    nested_size, offset = 0, 0.0
    if "weight.nested_absmax" in module.entries:
        nested_size = stated.get("nested_blocksize")
        value("nested_blocksize", type(nested_size) is int and nested_size in BLOCK_SIZES)
        offset = stated.get("nested_offset")
        value("nested_offset", type(offset) is float and math.isfinite(offset))
    return BlockState(
        shape=(shape[0], shape[1]),
        block_size=size,
        dtype=_DTYPES[dtype],
        nested_size=nested_size,
        nested_offset=offset,
    )

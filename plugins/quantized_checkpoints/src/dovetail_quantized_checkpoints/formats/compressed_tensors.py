"""compressed-tensors (llm-compressor): packed integers, int8, fp8 and fp4 weights.

format           tensors of a module (legend of `stored_weight`, b bits)
pack-quantized   weight_packed int32 [O, I * b / 32], weight_scale [O, G], weight_shape int64 [2];
                 weight_zero_point int32 [O * b / 32, G]; weight_g_idx int32 [I]
int-quantized    weight int8 [O, I], weight_scale; weight_zero_point int8
naive-quantized  as int-quantized or float-quantized
float-quantized  weight float8_e4m3fn [O, I], weight_scale
nvfp4            weight_packed uint8 [O, I / 2], weight_scale float8_e4m3fn [O, I / 16],
                 weight_global_scale float32 [1], which divides
mxfp4            weight_packed uint8 [O, I / 2], weight_scale uint8 [O, I / 32], an exponent
A weight_scale of integers and float8 numbers has one value, one of each row, one of each group of a
row, or one of each block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch

from dovetail.errors import WeightError
from dovetail.value_checks import shorten
from dovetail_quantized_checkpoints.formats.base import (
    Format,
    ModuleTensors,
    Read,
    choice,
    group_count,
)
from dovetail_quantized_checkpoints.packing import WORD_BITS, unpack
from dovetail_quantized_checkpoints.stored_weight import IntegerWeight, ScaledWeight, StoredWeight

FORMATS = (
    "dense",
    "pack-quantized",
    "int-quantized",
    "naive-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
SCALE_DTYPES = ("F16", "BF16", "F32")
MAX_GROUPS = 1000
FP4_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of the codes of float4_e2m1."""
NVFP4_GROUP, MXFP4_GROUP = 16, 32
EXPONENT_BIAS = 127


class CompressedTensors(Format):
    """Reads checkpoints of compressed-tensors without sparsity and transforms."""

    marks: ClassVar[tuple[str, ...]] = (".weight_packed", ".weight_scale")
    leaves: ClassVar[frozenset[str]] = frozenset(
        {
            "input_global_scale",
            "input_scale",
            "input_zero_point",
            "weight",
            "weight_g_idx",
            "weight_global_scale",
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
        }
    )

    def __init__(self, table: Mapping[str, Any]) -> None:
        """Check the fields of `quantization_config`."""
        choice(table, "format", FORMATS, "dense")
        choice(table, "quantization_status", ("compressed", "frozen"), "compressed")
        for field in ("sparsity_config", "transform_config"):
            if table.get(field):
                raise WeightError(
                    f"quantization_config: {field} is {shorten(table[field])}; it is not supported"
                )
        self._blocks = set(_block_structures(table))

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        """Return (O, I)."""
        if "weight_packed" not in module.entries:
            entry = module.entry("weight", ("I8", "F8_E4M3"), num_dims=2)
            num_outputs, num_inputs = entry.shape
        else:
            packed = module.entry("weight_packed", ("I32", "U8"), num_dims=2)
            if packed.dtype == "U8":
                num_outputs, num_inputs = packed.shape[0], 2 * packed.shape[1]
            else:
                num_outputs, num_inputs = self._stated_shape(module, read)
                bits = WORD_BITS * packed.shape[1] // max(1, num_inputs)
                if not 2 <= bits <= 8 or packed.shape != (
                    num_outputs,
                    -(-num_inputs * bits // WORD_BITS),
                ):
                    raise module.error(
                        f"has the shape {list(packed.shape)}, which does not fit weight_shape "
                        f"{[num_outputs, num_inputs]}",
                        "weight_packed",
                    )
        module.entry("weight_scale", (*SCALE_DTYPES, "F8_E4M3", "U8"))
        return num_outputs, num_inputs

    def _stated_shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        module.entry("weight_shape", ("I64", "I32"), num_dims=1)
        module.expect_shape("weight_shape", (2,))
        num_outputs, num_inputs = read(f"{module.prefix}weight_shape").tolist()
        if not (0 < num_outputs < 1 << 31 and 0 < num_inputs < 1 << 31):
            raise module.error(f"states {[num_outputs, num_inputs]}", "weight_shape")
        return num_outputs, num_inputs

    def open(self, module: ModuleTensors, read: Read) -> StoredWeight:
        """Return the weight."""
        shape = self.shape(module, read)
        if "weight_packed" in module.entries and module.entries["weight_packed"].dtype == "U8":
            return _fp4(module, read, shape)
        scale = module.entry("weight_scale", SCALE_DTYPES)
        rows, columns = _scale_grid(module, scale.shape, shape, self._blocks)
        scales = read(f"{module.prefix}weight_scale").reshape(rows, columns)
        is_float = module.entries.get("weight", scale).dtype == "F8_E4M3"
        if is_float and "weight_packed" not in module.entries:
            weight = read(f"{module.prefix}weight")
            height, width = _block_size(shape, (rows, columns), self._blocks)
            return ScaledWeight(
                shape=shape,
                numbers=lambda chosen: weight[chosen].to(scales.dtype),
                scales=scales,
                block=(height, width),
            )
        return _integers(module, read, shape, scales)


def _block_structures(table: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the sizes of blocks that the configuration states."""
    groups = table.get("config_groups") or {}
    if not isinstance(groups, Mapping) or len(groups) > MAX_GROUPS:
        raise WeightError("quantization_config: config_groups must be an object of up to 1000 keys")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            raise WeightError(
                f"quantization_config: config_groups.{shorten(name)} must have the key 'weights'"
            )
        if isinstance(group.get("format"), str):
            choice(group, "format", FORMATS, "dense")
        block = weights.get("block_structure")
        if isinstance(block, (list, tuple)) and [type(size) for size in block] == [int, int]:
            if not all(0 < size < 1 << 20 for size in block):
                raise WeightError(f"quantization_config: block_structure is {shorten(block)}")
            yield block[0], block[1]


def _scale_grid(
    module: ModuleTensors,
    actual: tuple[int, ...],
    shape: tuple[int, int],
    blocks: set[tuple[int, int]],
) -> tuple[int, int]:
    """Return the numbers of scales along O and I. Raise WeightError for an impossible shape."""
    num_outputs, num_inputs = shape
    grid = (*actual, 1, 1)[:2] if len(actual) < 3 else (0, 0)
    is_known = grid[0] == num_outputs and grid[1] >= 1
    fits = [(-(-num_outputs // a), -(-num_inputs // b)) for a, b in blocks]
    if grid != (1, 1) and not is_known and grid not in fits:
        raise module.error(
            f"has the shape {list(actual)}, which does not fit the weight {list(shape)}",
            "weight_scale",
        )
    if grid not in fits:
        group_count(module, "weight_scale", grid[1], num_inputs)
    return grid


def _block_size(
    shape: tuple[int, int], grid: tuple[int, int], blocks: set[tuple[int, int]]
) -> tuple[int, int]:
    for height, width in sorted(blocks):
        if grid == (-(-shape[0] // height), -(-shape[1] // width)):
            return height, width
    return shape[0] // grid[0], shape[1] // grid[1]


def _integers(
    module: ModuleTensors, read: Read, shape: tuple[int, int], scales: torch.Tensor
) -> IntegerWeight:
    num_outputs, num_inputs = shape
    if scales.shape[0] not in (1, num_outputs):
        raise module.error("has scales of blocks, which integers do not support", "weight_scale")
    scales = scales.expand(num_outputs, -1)
    if "weight_packed" not in module.entries:
        weight = read(f"{module.prefix}weight")
        zeros: torch.Tensor | int = 128
        if "weight_zero_point" in module.entries:
            module.entry("weight_zero_point", ("I8",))
            points = read(f"{module.prefix}weight_zero_point").to(torch.int16) + 128
            zeros = _expanded(module, points.reshape(-1, scales.shape[1]), scales)
        return IntegerWeight(
            shape=shape,
            bits=8,
            codes=lambda rows: weight[rows].to(torch.int16) + 128,
            scales=scales,
            zeros=zeros,
            groups=_groups(module, read, scales.shape[1], num_inputs),
        )
    words = read(f"{module.prefix}weight_packed")
    bits = WORD_BITS * words.shape[1] // num_inputs
    zeros = 1 << bits - 1
    if "weight_zero_point" in module.entries:
        module.entry("weight_zero_point", ("I32",), num_dims=2)
        module.expect_shape(
            "weight_zero_point", (-(-num_outputs * bits // WORD_BITS), scales.shape[1])
        )
        packed = read(f"{module.prefix}weight_zero_point").T.contiguous()
        zeros = unpack(packed, bits)[:, :num_outputs].T.contiguous()
    return IntegerWeight(
        shape=shape,
        bits=bits,
        codes=lambda rows: unpack(words[rows], bits)[:, :num_inputs],
        scales=scales,
        zeros=zeros,
        groups=_groups(module, read, scales.shape[1], num_inputs),
    )


def _expanded(module: ModuleTensors, points: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if points.shape[0] not in (1, scales.shape[0]):
        raise module.error("does not fit weight_scale", "weight_zero_point")
    return points.expand(scales.shape[0], -1)


def _groups(
    module: ModuleTensors, read: Read, num_groups: int, num_inputs: int
) -> torch.Tensor | None:
    """Return the group of each feature if the features of groups are not successive."""
    if "weight_g_idx" not in module.entries:
        return None
    module.entry("weight_g_idx", ("I32", "I64"))
    module.expect_shape("weight_g_idx", (num_inputs,))
    groups = read(f"{module.prefix}weight_g_idx").to(torch.int64)
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise module.error(f"names a group that is not one of {num_groups}", "weight_g_idx")
    return groups


def _fp4(module: ModuleTensors, read: Read, shape: tuple[int, int]) -> ScaledWeight:
    """Return a weight of fp4 codes; the low four bits of a byte are first."""
    packed = read(f"{module.prefix}weight_packed")
    scale = module.entry("weight_scale", ("F8_E4M3", "U8"), num_dims=2)
    group = NVFP4_GROUP if scale.dtype == "F8_E4M3" else MXFP4_GROUP
    if shape[1] % group:
        raise module.error(f"has {shape[1]} features, not a multiple of {group}", "weight_packed")
    module.expect_shape("weight_scale", (shape[0], shape[1] // group))
    scales = read(f"{module.prefix}weight_scale").float()
    if group == NVFP4_GROUP:
        module.entry("weight_global_scale", ("F32",))
        module.expect_shape("weight_global_scale", (1,))
        scales = scales / read(f"{module.prefix}weight_global_scale")
    else:
        scales = torch.exp2(scales - EXPONENT_BIAS)

    def numbers(rows: slice) -> torch.Tensor:
        codes = torch.stack((packed[rows] & 15, packed[rows] >> 4), dim=-1).flatten(1)
        return FP4_VALUES[codes.long()]

    return ScaledWeight(shape=shape, numbers=numbers, scales=scales, block=(1, group))

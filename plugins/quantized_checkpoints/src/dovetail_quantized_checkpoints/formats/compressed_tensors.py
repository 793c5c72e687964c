"""compressed-tensors (llm-compressor): packed integers, int8, fp8 and fp4 weights.

format           tensors of a module (legend of `stored_weight`, b bits)
pack-quantized   weight_packed int32 [O, I * b / 32], weight_scale [O, G], weight_shape int64 [2];
                 weight_zero_point int32 [O * b / 32, G]; weight_g_idx int32 [I]
int-quantized    weight int8 [O, I], weight_scale; weight_zero_point int8
naive-quantized  as int-quantized or float-quantized
float-quantized  weight float8_e4m3fn [O, I], weight_scale
nvfp4            weight_packed uint8 [O, I / 2], weight_scale float8_e4m3fn [O, I / 16],
                 weight_global_scale float32 [1], a divisor
mxfp4            weight_packed uint8 [O, I / 2], weight_scale uint8 [O, I / 32], an exponent
For integers and float8 numbers, weight_scale has one value per tensor, per row, per group of a row,
or per block.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from dovetail_quantized_checkpoints.formats.schemes import read_schemes
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
            if table.get(field) and not _is_dense(table[field]):
                raise WeightError(
                    f"quantization_config: {field} is {shorten(table[field])}; it is not supported"
                )
        self._schemes = read_schemes(table)
        self.quantizes_all = bool(self._schemes) and all(
            group.get("targets") == ["Linear"] for group in table["config_groups"].values()
        )

    def shape(self, module: ModuleTensors, read: Read) -> tuple[int, int]:
        """Return (O, I)."""
        if "weight_packed" not in module.entries:
            stated = module.entry("weight", ("I8", "F8_E4M3"), num_dims=2).shape
            shape, leaf, bits = (stated[0], stated[1]), "weight", 8
        else:
            packed = module.entry("weight_packed", ("I32", "U8"), num_dims=2)
            leaf = "weight_packed"
            if packed.dtype == "U8":
                shape, bits = (packed.shape[0], 2 * packed.shape[1]), 4
            else:
                shape = self._stated_shape(module, read)
                bits = self._packed_bits(module, packed.shape, shape)
        if not all(shape):
            raise module.error("is empty", leaf)
        if self._schemes and not any(scheme.bits == bits for scheme in self._schemes):
            stated_bits = ", ".join(sorted({str(scheme.bits) for scheme in self._schemes}))
            raise module.error(
                f"has codes of {bits} bits, but quantization_config states {stated_bits}", leaf
            )
        module.entry("weight_scale", (*SCALE_DTYPES, "F8_E4M3", "U8"))
        return shape

    def _packed_bits(
        self, module: ModuleTensors, packed: tuple[int, ...], shape: tuple[int, int]
    ) -> int:
        """Return the number of bits per code. Try the configured numbers first."""
        num_outputs, num_inputs = shape
        stated = [scheme.bits for scheme in self._schemes]
        for bits in (*stated, *range(2, 9)):
            if 2 <= bits <= 8 and packed == (num_outputs, -(-num_inputs * bits // WORD_BITS)):
                return bits
        raise module.error(
            f"has the shape {list(packed)}, which does not fit weight_shape {list(shape)}",
            "weight_packed",
        )

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
        block = self._scale_block(module, scale.shape, shape)
        scales = read(f"{module.prefix}weight_scale")
        scales = scales.reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        if "weight_packed" not in module.entries and module.entries["weight"].dtype == "F8_E4M3":
            weight = read(f"{module.prefix}weight")
            return ScaledWeight(
                shape=shape,
                numbers=lambda chosen: weight[chosen].to(scales.dtype),
                scales=scales,
                block=block,
            )
        if block[0] not in (1, shape[0]):
            raise module.error(
                "has block scales, which are not supported for integers", "weight_scale"
            )
        if shape[1] % block[1]:
            raise module.error(
                f"has the group size {block[1]}, which does not divide {shape[1]} input features",
                "weight_scale",
            )
        words = module.entries.get("weight_packed")
        bits = 8 if words is None else self._packed_bits(module, words.shape, shape)
        return _integers(module, read, shape, scales, bits)

    def _scale_block(
        self, module: ModuleTensors, actual: tuple[int, ...], shape: tuple[int, int]
    ) -> tuple[int, int]:
        """Return how many rows and columns share a scale. Raise WeightError for an invalid shape.

        actual: the shape of `weight_scale`.
        """
        grid = (*actual, 1, 1)[:2] if len(actual) < 3 else (0, 0)
        for scheme in self._schemes:
            if grid == scheme.grid(shape):
                return scheme.block[0] or shape[0], scheme.block[1] or shape[1]
        num_outputs, num_inputs = shape
        if self._schemes or not (grid == (1, 1) or (grid[0] == num_outputs and grid[1] >= 1)):
            configured = sorted(scheme.grid(shape) for scheme in self._schemes)
            expected = f"; quantization_config states {configured}"[:200] if configured else ""
            raise module.error(
                f"has the shape {list(actual)}, which does not fit the weight {list(shape)}"
                f"{expected}",
                "weight_scale",
            )
        group_count(module, "weight_scale", grid[1], num_inputs)
        return num_outputs // grid[0], num_inputs // grid[1]


def _is_dense(table: Any) -> bool:
    return isinstance(table, Mapping) and table.get("format") == "dense"


def _integers(
    module: ModuleTensors, read: Read, shape: tuple[int, int], scales: torch.Tensor, bits: int
) -> IntegerWeight:
    num_outputs, num_inputs = shape
    scales = scales.expand(num_outputs, -1)
    if "weight_packed" not in module.entries:
        weight = read(f"{module.prefix}weight")
        zeros: torch.Tensor | int = 128
        if "weight_zero_point" in module.entries:
            module.entry("weight_zero_point", ("I8",))
            module.expect_shape("weight_zero_point", module.entries["weight_scale"].shape)
            points = read(f"{module.prefix}weight_zero_point").to(torch.int16) + 128
            zeros = points.reshape(-1, scales.shape[1]).expand(num_outputs, -1)
        return IntegerWeight(
            shape=shape,
            bits=8,
            codes=lambda rows: weight[rows].view(torch.uint8) ^ 128,
            scales=scales,
            zeros=zeros,
            groups=_groups(module, read, scales.shape[1], num_inputs),
        )
    words = read(f"{module.prefix}weight_packed")
    zeros = 1 << bits - 1
    if "weight_zero_point" in module.entries:
        module.entry("weight_zero_point", ("I32",), num_dims=2)
        module.expect_shape(
            "weight_zero_point", (-(-num_outputs * bits // WORD_BITS), scales.shape[1])
        )
        packed = read(f"{module.prefix}weight_zero_point").T.contiguous()
        zeros = unpack(packed, bits)[:, :num_outputs].T.to(torch.int16)
    return IntegerWeight(
        shape=shape,
        bits=bits,
        codes=lambda rows: unpack(words[rows], bits)[:, :num_inputs],
        scales=scales,
        zeros=zeros,
        groups=_groups(module, read, scales.shape[1], num_inputs),
    )


def _groups(
    module: ModuleTensors, read: Read, num_groups: int, num_inputs: int
) -> torch.Tensor | None:
    """Return the group index of each feature, or None if groups are consecutive features."""
    if "weight_g_idx" not in module.entries:
        return None
    module.entry("weight_g_idx", ("I32", "I64"))
    module.expect_shape("weight_g_idx", (num_inputs,))
    groups = read(f"{module.prefix}weight_g_idx").to(torch.int64)
    if bool((groups == -1).all()):
        return None  # llm-compressor stores this if features are in order
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        raise module.error(f"names a group that is not one of {num_groups}", "weight_g_idx")
    return groups


def _fp4(module: ModuleTensors, read: Read, shape: tuple[int, int]) -> ScaledWeight:
    """Return a weight with fp4 codes. The low four bits of a byte are the first code."""
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

"""The linear methods `int8`, `int4` and `q4_k`, which quantize weights on loading, and `gguf`.

Weights have one scale per output feature and group of input features; activations have one scale
per token and group. A group has 32 features for int8 and GGUF blocks (16 for Q6_K), `group_size`
for int4. Rounds to nearest; the kernels' header defines the formats. Inputs and outputs are
bfloat16, logits float32. `int8` and `gguf` round the activations of some groups, which have most of
the error, to 15 bits (the option `refined_groups`), except those of experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces import LinearShape
from dovetail_cpu.mapped_pages import forget_pages
from dovetail_cpu.native_linear import NativeLinearMethod, Run
from dovetail_cpu.options import GGUFOptions, Int4Options, Int8Options, Q4KOptions
from dovetail_cpu_kernels.linear import (
    BF16,
    BLOCK_BYTES,
    INT4,
    INT8,
    KIND_NAMES,
    REFINE,
    REFINE_MOST,
    ROUNDED,
    PackedLinear,
)
from dovetail_torch.layers.embedding import ParallelLMHead
from dovetail_torch.layers.linear import BlockWeight

logger = logging.getLogger(__name__)

_REFINE = {"none": 0, "large": REFINE, "most": REFINE_MOST}
"""The flag of each value of the option `refined_groups`."""
_KINDS = {
    "bfloat16": BF16,
    "int8": INT8,
    "int4": INT4,
    "q4_1": KIND_NAMES.index("Q4_1"),
    "q4_k": KIND_NAMES.index("Q4_K"),
    "q6_k": KIND_NAMES.index("Q6_K"),
}


class QuantizedLinearMethod(NativeLinearMethod):
    """The base class. name: value of `quantization`.

    group_size: the group size of int4, otherwise 0. refine: as in `PackedLinear`.
    """

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    def __init__(self, *, head: str, group_size: int = 0, refine: int = 0) -> None:
        super().__init__()
        self._head, self._group_size, self._refine = head, group_size, refine

    def packed_format(self) -> str:
        """Return format, version and options."""
        return f"{super().packed_format()}/{self._group_size}/{self._head}"

    def _spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear:
        """Return the layer's packed format. Raise ConfigError for a dtype other than bfloat16."""
        if shape.dtype != torch.bfloat16:
            raise ConfigError(
                f"quantization={self.name!r} needs dtype='bfloat16', but "
                f"dtype={str(shape.dtype).removeprefix('torch.')!r} was given: set "
                "dtype='bfloat16', or remove quantization"
            )
        name = self._head if isinstance(layer, ParallelLMHead) else self.name
        kind = self._kind(name, shape.in_features)
        return PackedLinear(
            kind=kind,
            N=shape.out_features,
            K=shape.in_features,
            group=self._group_size if kind == INT4 else 0,
            rounds=KIND_NAMES[kind] in ROUNDED,
            refine=self._refine,
        )

    def _kind(self, name: str, in_features: int) -> int:
        """Return the weight kind of a format, given by its name in the options."""
        return _KINDS[name] if _fits(_KINDS[name], in_features) else INT8


class Int8LinearMethod(QuantizedLinearMethod):
    """Uses eight bits per weight and most activations, with one scale for each group of 32."""

    name: ClassVar[str] = "int8"
    error: ClassVar[float] = 0.05

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        chosen = Int8Options(**(options or {}))
        super().__init__(head=chosen.head, refine=_refine(self.name, chosen.refined_groups))


class Int4LinearMethod(QuantizedLinearMethod):
    """Uses 4-bit weights (6-bit in the LM head) and 8-bit activations, all with group scales."""

    name: ClassVar[str] = "int4"
    error: ClassVar[float] = 0.6

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        chosen = Int4Options(**(options or {}))
        super().__init__(head=chosen.head, group_size=chosen.group_size)


class Q4KLinearMethod(QuantizedLinearMethod):
    """Uses Q4_K blocks: 4-bit weights, with two levels of scales and minima.

    A layer whose number of input features is not a multiple of 256 uses the format `fallback`, or
    int8 if its blocks do not fit either.
    """

    name: ClassVar[str] = "q4_k"
    error: ClassVar[float] = 0.5

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        chosen = Q4KOptions(**(options or {}))
        super().__init__(head=chosen.head)
        self._fallback = chosen.fallback

    def packed_format(self) -> str:
        """Return format, version and options."""
        return f"{super().packed_format()}/{self._fallback}"

    def _kind(self, name: str, in_features: int) -> int:
        if name == self.name and not _fits(_KINDS[name], in_features):
            name = self._fallback
        return super()._kind(name, in_features)


class GGUFLinearMethod(NativeLinearMethod):
    """Computes with the quantized blocks of GGUF files.

    Packing reorders codes, scales and minima; nothing is requantized. Codes of 5 bits use a
    byte each. Parts of a layer that the loader does not provide as blocks are packed as
    bfloat16. For other dtypes, loaders dequantize all blocks. Experts are computed in one call if
    all their weights of a layer have the same type, otherwise one by one.
    """

    provides: ClassVar[frozenset[str]] = NativeLinearMethod.provides | {"quantization.gguf"}

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._refine = _refine("gguf", GGUFOptions(**(options or {})).refined_groups)

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` as in the checkpoint. Rows of blocks are not written."""
        super().create(layer, shape)
        if layer.packed_spec is not None:
            layer.block_types = frozenset(BLOCK_BYTES)

    def _runs(self, layer: nn.Module) -> list[Run]:
        expected: dict[int, str] = getattr(layer, "expected_blocks", {})
        shape: LinearShape = layer.packed_shape

        def kind_of(number: int) -> int:
            return KIND_NAMES.index(expected[number]) if number in expected else BF16

        kinds = [kind_of(number) for number in range(len(shape.part_sizes))]
        if shape.num_experts > 1 and len(set(kinds)) == 1:
            spec = replace(layer.packed_spec, kind=kinds[0])
            return [replace(run, spec=spec) for run in super()._runs(layer)]
        # The parts of different experts are different weights.
        num_parts = len(kinds) // shape.num_experts
        runs = []
        for _, group in groupby(range(len(kinds)), key=lambda n: (n // num_parts, kinds[n])):
            numbers = list(group)
            num_rows = sum(shape.part_sizes[number] for number in numbers)
            spec = PackedLinear(
                kind=kinds[numbers[0]],
                N=num_rows,
                K=shape.in_features,
                refine=layer.packed_spec.refine,
            )
            runs.append(Run(spec=spec, parts=range(numbers[0], numbers[-1] + 1)))
        return runs

    def _spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear | None:
        spec = super()._spec(layer, shape)
        return None if spec is None else replace(spec, refine=self._refine)

    def _weights(self, layer: nn.Module) -> list[torch.Tensor]:
        blocks: dict[int, BlockWeight] = getattr(layer, "blocks", {})
        return [
            blocks[number].rows_OB if number in blocks else rows_OI
            for number, rows_OI in enumerate(super()._weights(layer))
        ]

    def _release(self, layer: nn.Module) -> None:
        super()._release(layer)
        blocks: dict[int, BlockWeight] = getattr(layer, "blocks", {})
        for block in blocks.values():
            if block.is_mapped:
                forget_pages(block.rows_OB)
        blocks.clear()


def _refine(method: str, groups: str) -> int:
    """Return the flag of a value of the option `refined_groups`, which is logged."""
    logger.info("The linear method %s uses refined_groups=%s.", method, groups)
    return _REFINE[groups]


def _fits(kind: int, in_features: int) -> bool:
    """Return whether a row is a whole number of blocks, or True for formats without blocks."""
    size, _ = BLOCK_BYTES.get(KIND_NAMES[kind], (1, 1))
    return not in_features % size

"""The linear methods `int8` and `int4`: weights quantised when they are loaded.

int8: a scale an output feature, activations rounded to int8 as they come, a scale a token. int4: a
scale for each group of input features, of weights as of activations. Rounding is to nearest; the
kernels' header states the forms. Computes in bfloat16 around the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from dovetail.errors import ConfigError
from dovetail.interfaces import LinearShape
from dovetail_cpu.native_linear import NativeLinearMethod
from dovetail_cpu.options import Int4Options, Int8Options
from dovetail_cpu_kernels.linear import BF16, INT4, INT8, MAX_INT8_K, PackedLinear
from dovetail_torch.layers.embedding import ParallelLMHead

_KINDS = {"bfloat16": BF16, "int8": INT8, "int4": INT4}


class QuantisedLinearMethod(NativeLinearMethod):
    """The base of both. name: as in `quantization`. group_size: 0 where a form has no groups."""

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    def __init__(self, *, head: str, group_size: int = 0) -> None:
        super().__init__()
        self._head, self._group_size = head, group_size

    def packed_format(self) -> str:
        """Return form, version and options."""
        return f"{super().packed_format()}/{self._group_size}/{self._head}"

    def _spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear:
        """Return the layer's packed form; raise ConfigError for a dtype that is not bfloat16."""
        if shape.dtype != torch.bfloat16:
            raise ConfigError(
                f"quantization={self.name!r} computes in bfloat16 around its products, and "
                f"dtype={str(shape.dtype).removeprefix('torch.')!r} is asked: give "
                "dtype='bfloat16', or leave quantization out"
            )
        kind = _KINDS[self._head if isinstance(layer, ParallelLMHead) else self.name]
        if kind == INT8 and shape.in_features > MAX_INT8_K:
            kind = BF16  # sums of int8 products could leave 32 bits
        return PackedLinear(
            kind=kind,
            N=shape.out_features,
            K=shape.in_features,
            group=self._group_size if kind == INT4 else 0,
        )


class Int8LinearMethod(QuantisedLinearMethod):
    """Eight bits a weight, one scale an output feature; activations in eight bits, too."""

    name: ClassVar[str] = "int8"
    error: ClassVar[float] = 0.05

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(head=Int8Options(**(options or {})).head)


class Int4LinearMethod(QuantisedLinearMethod):
    """Four bits a weight and a scale a group; activations in eight bits, a scale a group."""

    name: ClassVar[str] = "int4"
    error: ClassVar[float] = 0.6

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        chosen = Int4Options(**(options or {}))
        super().__init__(head=chosen.head, group_size=chosen.group_size)

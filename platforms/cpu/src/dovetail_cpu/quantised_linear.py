"""The linear methods `int8` and `int4`: weights are quantized when they are loaded.

Weights have one scale per output feature and group of input features, activations one per token and
group: of 32 for int8, of `group_size` for int4. Rounds to nearest; the kernels' header defines the
formats. Inputs and outputs are bfloat16.
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
from dovetail_cpu_kernels.linear import BF16, INT4, INT8, PackedLinear
from dovetail_torch.layers.embedding import ParallelLMHead

_KINDS = {"bfloat16": BF16, "int8": INT8, "int4": INT4}


class QuantisedLinearMethod(NativeLinearMethod):
    """The base class of both. name: the value of `quantization`. group_size: of int4, else 0."""

    name: ClassVar[str]
    dtypes: ClassVar[frozenset[str]] = frozenset({"bfloat16"})

    def __init__(self, *, head: str, group_size: int = 0) -> None:
        super().__init__()
        self._head, self._group_size = head, group_size

    def packed_format(self) -> str:
        """Return format, version and options."""
        return f"{super().packed_format()}/{self._group_size}/{self._head}"

    def _spec(self, layer: nn.Module, shape: LinearShape) -> PackedLinear:
        """Return the layer's packed format; raise ConfigError for a dtype other than bfloat16."""
        if shape.dtype != torch.bfloat16:
            raise ConfigError(
                f"quantization={self.name!r} needs dtype='bfloat16', but "
                f"dtype={str(shape.dtype).removeprefix('torch.')!r} was given: set "
                "dtype='bfloat16', or remove quantization"
            )
        kind = _KINDS[self._head if isinstance(layer, ParallelLMHead) else self.name]
        return PackedLinear(
            kind=kind,
            N=shape.out_features,
            K=shape.in_features,
            group=self._group_size if kind == INT4 else 0,
        )


class Int8LinearMethod(QuantisedLinearMethod):
    """Uses eight bits per weight and activation; both have a scale per group of 32."""

    name: ClassVar[str] = "int8"
    error: ClassVar[float] = 0.05

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(head=Int8Options(**(options or {})).head)


class Int4LinearMethod(QuantisedLinearMethod):
    """Uses four bits per weight, eight in the head; 8-bit activations; all have group scales."""

    name: ClassVar[str] = "int4"
    error: ClassVar[float] = 0.6

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        chosen = Int4Options(**(options or {}))
        super().__init__(head=chosen.head, group_size=chosen.group_size)

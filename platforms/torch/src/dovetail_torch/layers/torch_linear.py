"""The linear method `torch`: weights as in the checkpoint, applied by torch's linear.

It packs nothing and runs on any device. Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.linear_method import LinearMethod, LinearShape


class TorchLinearMethod(LinearMethod):
    """Keeps an unpacked weight [O, I] and an optional bias [O]."""

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` (None without bias), uninitialized."""
        factory_kwargs = {"dtype": shape.dtype, "device": shape.device}
        weight_OI = torch.empty(shape.out_features, shape.in_features, **factory_kwargs)
        layer.register_parameter("weight", nn.Parameter(weight_OI, requires_grad=False))
        bias = None
        if shape.bias:
            bias = nn.Parameter(
                torch.empty(shape.out_features, **factory_kwargs), requires_grad=False
            )
        layer.register_parameter("bias", bias)

    def pack(self, layer: nn.Module) -> None:
        """Do nothing: torch's linear uses the checkpoint's layout."""

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, a new tensor [T, O]."""
        return functional.linear(x_TI, layer.weight, layer.bias)

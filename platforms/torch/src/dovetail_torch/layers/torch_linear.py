"""The linear method `torch`: weights as the checkpoint has them, applied by torch's own linear.

It packs nothing and knows no device. Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.linear_method import LinearMethod, LinearShape


class TorchLinearMethod(LinearMethod):
    """Keep a plain weight [O, I] and, where there is one, a bias [O]."""

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` (None without bias), uninitialised."""
        place = {"dtype": shape.dtype, "device": shape.device}
        weight_OI = torch.empty(shape.out_features, shape.in_features, **place)
        layer.register_parameter("weight", nn.Parameter(weight_OI, requires_grad=False))
        bias = None
        if shape.bias:
            bias = nn.Parameter(torch.empty(shape.out_features, **place), requires_grad=False)
        layer.register_parameter("bias", bias)

    def pack(self, layer: nn.Module) -> None:
        """Leave the weights as they are: torch's linear wants the checkpoint's form."""

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, a new tensor [T, O]."""
        return functional.linear(x_TI, layer.weight, layer.bias)

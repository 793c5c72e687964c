"""The linear method `torch`: weights as in the checkpoint, applied by torch's linear.

It packs nothing and runs on any device. Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.linear_method import EXPERTS, ExpertLayers, LinearMethod, LinearShape
from dovetail.interfaces.ops import ExpertWeights


class TorchLinearMethod(LinearMethod):
    """Keeps an unpacked weight [O, I] and an optional bias [O]."""

    provides: ClassVar[frozenset[str]] = frozenset({EXPERTS})

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

    def apply_experts(
        self,
        layers: ExpertLayers,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, a new tensor [T, D]."""
        return layers.ops.fused_experts(x_TD, experts_TK, weights_TK, unpacked_experts(layers))


def unpacked_experts(layers: ExpertLayers) -> ExpertWeights:
    """Return the weights of each expert: views of the stacked parameters `weight` and `bias`."""
    num_experts = layers.gate_up.shape.num_experts

    def split(layer: nn.Module, name: str) -> torch.Tensor | None:
        parameter = getattr(layer, name)
        return None if parameter is None else parameter.unflatten(0, (num_experts, -1))

    return ExpertWeights(
        gate_up_EGD=split(layers.gate_up, "weight"),
        down_EDI=split(layers.down, "weight"),
        gate_up_bias_EG=split(layers.gate_up, "bias"),
        down_bias_ED=split(layers.down, "bias"),
        limit=layers.limit,
        alpha=layers.alpha,
    )

"""A fake linear method that computes layers row by row in float64.

torch is imported within functions.
Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from dovetail.interfaces.linear_method import ACTIVATION, LinearMethod, LinearShape
from dovetail_devkit.linear_activation import exact_activations

if TYPE_CHECKING:
    import torch
    from torch import nn


class FakeLinearMethod(LinearMethod):
    """Stores an unpacked weight [O, I] and an optional bias [O]."""

    provides: ClassVar[frozenset[str]] = frozenset({ACTIVATION})

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` (None without bias), uninitialized."""
        import torch
        from torch import nn

        sizes = {"weight": (shape.out_features, shape.in_features), "bias": (shape.out_features,)}
        for name, size in sizes.items():
            parameter = None
            if name == "weight" or shape.bias:
                values = torch.empty(size, dtype=shape.dtype, device=shape.device)
                parameter = nn.Parameter(values, requires_grad=False)
            layer.register_parameter(name, parameter)

    def pack(self, layer: nn.Module) -> None:
        """Do nothing: the weights need no packing."""

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, a new tensor [T, O]."""
        return self._product(layer, x_TI).to(x_TI.dtype)

    def apply_activation(
        self, layer: nn.Module, x_TI: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Return activation(x · Wᵀ + b), a new tensor [T, O]."""
        return exact_activations()[activation](self._product(layer, x_TI)).to(x_TI.dtype)

    def _product(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b in float64."""
        weight_OI, bias_O = layer.weight, layer.bias
        y_TO = x_TI.double().new_empty((len(x_TI), len(weight_OI)))
        for index, weight_I in enumerate(weight_OI):
            y_T = (x_TI.double() * weight_I.double()).sum(-1)
            y_TO[:, index] = y_T if bias_O is None else y_T + bias_O[index].double()
        return y_TO

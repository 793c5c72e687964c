"""Norms over the last dimension: root mean square, and mean and variance.

Every norm has `add`, which adds a residual first. Dimensions: T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail.interfaces.model import ModelContext


class Norm(nn.Module):
    """The base of all norms."""

    def add(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized sum x + residual, and the sum. `residual_TD` may be overwritten."""
        sum_TD = residual_TD.add_(x_TD)
        return self(sum_TD), sum_TD


class RMSNorm(Norm):
    """Computes x / sqrt(mean(x²) + eps) · weight over the last dimension with the context's ops.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, context: ModelContext, num_features: int, eps: float) -> None:
        super().__init__()
        weight_D = torch.empty(num_features, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight_D, requires_grad=False)
        self.eps = eps
        self.ops = context.ops

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the normalized values of `x_TD`, which may have any leading dimensions."""
        return self.ops.rms_norm(x_TD, self.weight, self.eps)

    def add(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized sum x + residual, and the sum. `residual_TD` may be overwritten."""
        return self.ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Computes x / sqrt(mean(x²) + eps) · (1 + weight), with the context's ops.

    Source: Gemma team 2024, arXiv:2403.08295; the factor 1 + weight is that of its reference code.
    """

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the normalized values of `x_TD`, which may have any leading dimensions."""
        return self.ops.offset_rms_norm(x_TD, self.weight, self.eps)

    def add(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized sum x + residual, and the sum. `residual_TD` may be overwritten."""
        return self.ops.add_offset_rms_norm(x_TD, residual_TD, self.weight, self.eps)


class LayerNorm(Norm):
    """Computes (x - mean) / sqrt(variance + eps) · weight + bias with the context's ops.

    has_weight, has_bias: whether the parameters exist. Source: Ba et al. 2016, arXiv:1607.06450.
    """

    def __init__(
        self,
        context: ModelContext,
        num_features: int,
        eps: float,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
    ) -> None:
        super().__init__()
        self.eps, self.ops = eps, context.ops
        for name, exists in (("weight", has_weight), ("bias", has_bias)):
            values_D = torch.empty(num_features, dtype=context.dtype, device=context.device)
            parameter = nn.Parameter(values_D, requires_grad=False) if exists else None
            self.register_parameter(name, parameter)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the normalized values of `x_TD`, which may have any leading dimensions."""
        return self.ops.layer_norm(x_TD, self.weight, self.bias, self.eps)

    def add(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized sum x + residual, and the sum. `residual_TD` may be overwritten."""
        return self.ops.add_layer_norm(x_TD, residual_TD, self.weight, self.bias, self.eps)

"""Root-mean-square norm, alone or with a residual that is added first.

Dimensions: T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail.interfaces.model import ModelContext


class RMSNorm(nn.Module):
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
        """Return the normalized x, which may have any leading dimensions."""
        return self.ops.rms_norm(x_TD, self.weight, self.eps)

    def add(
        self, x_TD: torch.Tensor, residual_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized sum x + residual, and the sum. `residual_TD` may be overwritten."""
        return self.ops.add_rms_norm(x_TD, residual_TD, self.weight, self.eps)

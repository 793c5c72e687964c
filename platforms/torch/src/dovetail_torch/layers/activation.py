"""Activations between two linear layers, computed by the context's ops.

Dimensions: T tokens, D features.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail.interfaces.model import ModelContext


class SiluAndMul(nn.Module):
    """Computes silu(gate) · up from concatenated gate and up: [T, 2·D] to [T, D].

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.ops = context.ops

    def forward(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return the activations, [T, D]."""
        return self.ops.silu_and_mul(x_T2D)

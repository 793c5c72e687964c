"""The MLP of a decoder layer: gated, or with a single projection.

Dimensions: T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from dovetail.interfaces.model import ModelContext
from dovetail_models.decoder.shape import DecoderShape
from dovetail_torch.layers import (
    Activation,
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    RowParallelLinear,
    gated_activation,
)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) · up(x)). Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, context: ModelContext, name: str, shape: DecoderShape) -> None:
        super().__init__()
        inner, bias = shape.intermediate_size, shape.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            context,
            f"{name}.gate_up_proj",
            shape.hidden_size,
            {"gate_proj": inner, "up_proj": inner},
            bias=bias,
        )
        self.act_fn = gated_activation(context, shape.activation)
        self.down_proj = RowParallelLinear(
            context, f"{name}.down_proj", inner, shape.hidden_size, bias=bias
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, [T, D]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x_TD)))


class PlainMLP(nn.Module):
    """down(activation(up(x))). Source: Vaswani et al. 2017, arXiv:1706.03762."""

    def __init__(self, context: ModelContext, name: str, shape: DecoderShape) -> None:
        super().__init__()
        inner, bias = shape.intermediate_size, shape.mlp_bias
        self.up_proj = ColumnParallelLinear(
            context, f"{name}.up_proj", shape.hidden_size, inner, bias=bias
        )
        self.act_fn = Activation(context, shape.activation)
        self.down_proj = RowParallelLinear(
            context, f"{name}.down_proj", inner, shape.hidden_size, bias=bias
        )

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, [T, D]."""
        return self.down_proj(self.up_proj.activated(x_TD, self.act_fn))

"""Recurrent layers of Griffin: a convolution, and a gated linear recurrence (RG-LRU).

Source: De et al. 2024, arXiv:2402.19427.
Dimensions: T tokens, D hidden size, C channels of the rank, H heads of the rank, I channels of a
head, B blocks of states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.model import AttentionContext, ModelContext, StateTensor
from dovetail.interfaces.ops import RECURRENCE_OPERATIONS, GatedRecurrenceInputs, StateParts
from dovetail_models.decoder.shape import DecoderShape
from dovetail_models.decoder.state_branch import (
    StateBranch,
    head_parameter,
    shard_heads,
    times,
)
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.layers import (
    CausalConv,
    ParallelLinear,
    RowParallelLinear,
    StateLayer,
)

_SHARPNESS = 8.0
"""The constant c of the decay, exp(-c · softplus(recurrent_param) · gate)."""


@dataclass(frozen=True, kw_only=True)
class RecurrenceOptions:
    """The sizes of a recurrent layer. num_heads: blocks of a gate, each of head_size channels."""

    num_heads: int
    head_size: int
    kernel_size: int


class GatedRecurrence(nn.Module):
    """The RG-LRU. Each gate is a linear layer of each head.

    recurrent_param: the logarithms of the decays, which the loader computes.
    """

    def __init__(self, context: ModelContext, heads: Shard, head_size: int) -> None:
        super().__init__()
        self.ops = context.ops
        self.input_gate_weight, self.recurrent_gate_weight = (
            _gate_parameter(context, heads.size, head_size, head_size) for _ in range(2)
        )
        self.input_gate_bias, self.recurrent_gate_bias = (
            _gate_parameter(context, heads.size, head_size, dtype=torch.float32) for _ in range(2)
        )
        channels = times(heads, head_size)
        self.recurrent_param = head_parameter(context, channels)
        gates = ("input_gate_weight", "input_gate_bias")
        gates += ("recurrent_gate_weight", "recurrent_gate_bias")
        self.shards = dict.fromkeys(gates, heads) | {"recurrent_param": channels}
        self.converts = {"recurrent_param": _to_rates}

    def forward(
        self, x_TC: torch.Tensor, states_BC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the states after each token, a new tensor [T, C], and update the states."""
        x_THI = x_TC.unflatten(-1, self.input_gate_bias.shape)
        inputs = GatedRecurrenceInputs(
            x_TC=x_TC,
            input_gates_TC=self.ops.head_linear(x_THI, self.input_gate_weight.mT).flatten(1),
            decay_gates_TC=self.ops.head_linear(x_THI, self.recurrent_gate_weight.mT).flatten(1),
            input_bias_C=self.input_gate_bias.flatten(),
            decay_bias_C=self.recurrent_gate_bias.flatten(),
            rates_C=self.recurrent_param,
        )
        return self.ops.gated_recurrence(inputs, states_BC, parts)


class RecurrentBranch(StateBranch):
    """A convolution and an RG-LRU, multiplied by the GELU of a projection (by tanh)."""

    def __init__(
        self,
        context: ModelContext,
        name: str,
        shape: DecoderShape,
        index: int,
        options: RecurrenceOptions,
    ) -> None:
        super().__init__()
        heads = shard_heads(options.num_heads, context, name)
        channels = times(heads, options.head_size)
        self.in_proj = ParallelLinear(
            context,
            f"{name}.in_proj",
            shape.hidden_size,
            {"linear_y": channels, "linear_x": channels},
            bias=True,
        )
        self.ops = context.ops
        self.conv_1d = CausalConv(
            context, {"x": channels}, options.kernel_size, bias=True, activated=False
        )
        self.rg_lru = GatedRecurrence(context, heads, options.head_size)
        self.o_proj = RowParallelLinear(
            context, f"{name}.o_proj", channels.whole, shape.hidden_size, bias=True
        )
        state = StateTensor((channels.size,), torch.float32, context.device)
        self.attn = StateLayer(index, (self.conv_1d.state, state), RECURRENCE_OPERATIONS)

    def forward(
        self, x_TD: torch.Tensor, positions_T: torch.Tensor, attention: AttentionContext
    ) -> torch.Tensor:
        """Return the features of all channels, [T, C], before `o_proj`."""
        gate_TC, x_TC = self.in_proj(x_TD).chunk(2, dim=-1)
        state = self.attn(attention)
        x_TC = self.conv_1d(x_TC, state.tensors[0], state.parts)
        x_TC = self.rg_lru(x_TC, state.tensors[1], state.parts)
        return self.ops.gelu_tanh_and_mul(x_TC, gate_TC)


def _gate_parameter(
    context: ModelContext, *shape: int, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """Return an uninitialized parameter. dtype: None for the dtype of the model."""
    values = torch.empty(shape, dtype=dtype or context.dtype, device=context.device)
    return nn.Parameter(values, requires_grad=False)


def _to_rates(logits_C: torch.Tensor) -> None:
    """Replace each parameter by the logarithm of the decay for a gate of 1, in place."""
    logits_C.copy_(functional.softplus(logits_C)).mul_(-_SHARPNESS)

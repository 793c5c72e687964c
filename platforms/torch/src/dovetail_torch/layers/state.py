"""Recurrent layers, which have a state of fixed size instead of a cache of keys and values.

Like attention layers, they do not depend on blocks or on a cache: the runner reads the tensors of a
state and gives each step's states to the layer (`AttentionContext.state`).
Dimensions: T tokens, C channels of the rank, W kernel size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from dovetail.errors import ContractError
from dovetail.interfaces.kv_cache import aligned
from dovetail.interfaces.model import AttentionContext, LayerState, ModelContext, StateTensor
from dovetail.interfaces.ops import StateParts
from dovetail_torch.distributed.shard import Shard


class StateLayer(nn.Module):
    """A recurrent layer: it has a state of fixed size for each request.

    index: index of the layer among the attention layers and recurrent layers, from 0 in the order
    of creation; set by the model. tensors: the tensors of a state, for this rank. operations: names
    of operations of the layer other than `STATE_OPERATIONS` and `MIXED_OPERATIONS`.
    """

    def __init__(
        self, index: int, tensors: Sequence[StateTensor], operations: Collection[str] = ()
    ) -> None:
        """Create the layer. Raise ContractError for a state without tensors, or an empty tensor."""
        super().__init__()
        if not tensors or any(size < 1 for tensor in tensors for size in tensor.shape):
            raise ContractError(
                f"layer {index} has a state of the tensors {[list(t.shape) for t in tensors]}; "
                "use at least one tensor, and no empty tensor"
            )
        self.index = index
        self.tensors, self.operations = tuple(tensors), frozenset(operations)

    @property
    def num_bytes(self) -> int:
        """Bytes of one state. Each tensor is aligned to 64 bytes."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor of one state, aligned."""
        return tuple(
            aligned(torch.Size(tensor.shape).numel() * tensor.dtype.itemsize)
            for tensor in self.tensors
        )

    def forward(self, attention: AttentionContext) -> LayerState:
        """Return the states of the layer in this step."""
        return attention.state(self.index, self.tensors)


class CausalConv(nn.Module):
    """A convolution of each channel with its last W inputs.

    weight: [C, 1, W]; bias: [C] or None. activated: whether SiLU follows.
    parts: this rank's part of each group of channels that a checkpoint or a mapping names, in
    order. With several parts, the checkpoint's name of a part's weight is "part.weight".
    """

    def __init__(
        self,
        context: ModelContext,
        parts: Mapping[str, Shard],
        width: int,
        *,
        bias: bool,
        activated: bool = True,
    ) -> None:
        super().__init__()
        self.parts, self.width, self.activated = dict(parts), width, activated
        self.ops = context.ops
        num_channels = sum(shard.size for shard in parts.values())
        factory_kwargs = {"dtype": context.dtype, "device": context.device}
        weight = torch.empty(num_channels, 1, width, **factory_kwargs)
        self.weight = nn.Parameter(weight, requires_grad=False)
        bias_C = torch.empty(num_channels, **factory_kwargs) if bias else None
        self.bias = None if bias_C is None else nn.Parameter(bias_C, requires_grad=False)
        self.state = StateTensor((width - 1, num_channels), context.dtype, context.device)

    def forward(
        self, x_TC: torch.Tensor, states_BWC: torch.Tensor, parts: StateParts
    ) -> torch.Tensor:
        """Return the convolution, [T, C], activated or not, and update the states."""
        compute = self.ops.causal_conv if self.activated else self.ops.plain_causal_conv
        return compute(x_TC, self.weight[:, 0], self.bias, states_BWC, parts)

    def split(self, x_TC: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split the channels of `x_TC` into the parts. The results are views."""
        return x_TC.split([shard.size for shard in self.parts.values()], dim=-1)

"""What recurrent layers share: heads that are sharded over ranks, their parameters, and a norm.

Dimensions: T tokens, H heads of the rank, I features of all heads of the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_models.decoder.attention import AttentionBranch
from dovetail_torch.distributed.shard import Shard, shard_evenly, unsharded
from dovetail_torch.layers import StateLayer

MAX_KERNEL_SIZE = 64
"""The maximum width of a convolution; a larger one is treated as an error in the file."""


def check_sizes(sizes: Mapping[str, int], maximum: int) -> None:
    """Raise ModelError if a size is above `maximum`.

    sizes: each size, by its field in config.json.
    """
    for field, size in sizes.items():
        if size > maximum:
            raise ModelError(f"config.json: {field} is {size}; at most {maximum} is supported")


def _to_rates(logs_H: torch.Tensor) -> None:
    """Replace each logarithm of a rate by -exp(logarithm), in place."""
    logs_H.exp_().neg_()


RATES: Mapping[str, Callable[[torch.Tensor], None]] = {"A_log": _to_rates}
"""The value of `converts` in a layer whose checkpoint has the logarithms of its rates."""


class StateBranch(AttentionBranch):
    """The base class of recurrent layers. attn: the layer's state."""

    attn: StateLayer


def shard_heads(count: int, context: ModelContext, owner: str) -> Shard:
    """Return the rank's heads. owner: the layer's name. Raise ConfigError for uneven shares."""
    return shard_evenly(count, context.ranks, f"the {count} heads of {owner}")


def shard_groups(count: int, context: ModelContext, owner: str) -> Shard:
    """Return the rank's groups of heads. If the layer has a single group, every rank has it."""
    if count == 1:
        return unsharded(1)
    return shard_evenly(count, context.ranks, f"the {count} groups of heads of {owner}")


def times(shard: Shard, size: int) -> Shard:
    """Return the rank's features of heads with `size` features each."""
    return Shard(start=shard.start * size, size=shard.size * size, whole=shard.whole * size)


def head_parameter(context: ModelContext, heads: Shard) -> nn.Parameter:
    """Return an uninitialized parameter of the rank's heads, float32."""
    values_H = torch.empty(heads.size, dtype=torch.float32, device=context.device)
    return nn.Parameter(values_H, requires_grad=False)


class GatedGroupNorm(nn.Module):
    """RMS norm of y · silu(gate) in groups of equal size.

    shards: this rank's part of the weight; read by the weight loader. Ranks that share a group
    all-reduce its sum of squares. Source: the reference code of Mamba 2 (Dao and Gu 2024).
    """

    def __init__(self, context: ModelContext, features: Shard, groups: Shard, eps: float) -> None:
        super().__init__()
        weight_I = torch.empty(features.size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight_I, requires_grad=False)
        self.shards = {"weight": features}
        self.num_groups, self.group_size = groups.size, features.whole // groups.whole
        self.eps, self.ranks, self.ops = eps, context.ranks, context.ops
        self.is_shared = groups.is_whole and not features.is_whole

    def forward(self, y_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """Return the normalized product, in the dtype of the gate. `y_TI` may be overwritten.

        y_TI: float32.
        """
        if self.is_shared:
            return self._sum_over_ranks(y_TI, gate_TI)
        sizes = (self.num_groups, -1)
        y_TGI = self.ops.gated_rms_norm(
            y_TI.unflatten(-1, sizes),
            gate_TI.unflatten(-1, sizes),
            self.weight.unflatten(0, sizes),
            self.eps,
            norm_first=False,
        )
        return y_TGI.flatten(-2)

    def _sum_over_ranks(self, y_TI: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """Return the normalized product if the ranks share the only group."""
        gated_TI = y_TI * functional.silu(gate_TI.float())
        square_T1 = self.ranks.all_reduce(gated_TI.square().sum(-1, keepdim=True))
        scale_T1 = torch.rsqrt(square_T1 / self.group_size + self.eps)
        return (self.weight * (gated_TI * scale_T1)).to(gate_TI.dtype)

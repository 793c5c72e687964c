"""Norms of hidden states, and norms of the heads of queries and keys.

Dimensions: T tokens, H heads of the rank, S head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.model import ModelContext
from dovetail_torch.distributed.shard import Shard
from dovetail_torch.layers import LayerNorm, Norm, OffsetRMSNorm, RMSNorm

MakeNorm = Callable[[ModelContext, int], Norm]
"""Makes a norm over the given number of features."""
MakeHeadNorm = Callable[[ModelContext, Shard, int], nn.Module]
"""Makes a norm of [T, H, S] from the rank's part of the features of all heads, and S."""


def rms_norm(eps: float) -> MakeNorm:
    """Return a factory for `RMSNorm`."""
    return lambda context, size: RMSNorm(context, size, eps)


def offset_rms_norm(eps: float) -> MakeNorm:
    """Return a factory for `OffsetRMSNorm`."""
    return lambda context, size: OffsetRMSNorm(context, size, eps)


def layer_norm(eps: float, *, has_weight: bool = True, has_bias: bool = True) -> MakeNorm:
    """Return a factory for `LayerNorm`."""
    return lambda context, size: LayerNorm(
        context, size, eps, has_weight=has_weight, has_bias=has_bias
    )


def norm_of_each_head(norm: MakeNorm) -> MakeHeadNorm:
    """Return a factory for a norm of each head, with the same weights for all heads."""
    return lambda context, _, head_size: norm(context, head_size)


def norm_of_all_heads(eps: float) -> MakeHeadNorm:
    """Return a factory for `AllHeadsRMSNorm`."""
    return lambda context, features, _: AllHeadsRMSNorm(context, features, eps)


def norm_with_weights_of_heads(eps: float) -> MakeHeadNorm:
    """Return a factory for `HeadWeightsNorm`."""
    return lambda context, features, head_size: HeadWeightsNorm(context, features, head_size, eps)


def norms_by_head(eps: float) -> MakeHeadNorm:
    """Return a factory for `HeadNorms`."""
    return lambda context, features, head_size: HeadNorms(context, features, head_size, eps)


class AllHeadsRMSNorm(nn.Module):
    """RMS norm over the features of all heads together, on all ranks.

    shards: this rank's part of the weight; read by the weight loader.
    """

    def __init__(self, context: ModelContext, features: Shard, eps: float) -> None:
        super().__init__()
        weight = torch.empty(features.size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.shards = {"weight": features}
        self.num_features = features.size * context.ranks.size
        self.eps, self.ranks = eps, context.ranks

    def forward(self, x_THS: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads, [T, H, S]."""
        x_TO = x_THS.flatten(1).float()
        # A key-value head that several ranks have is counted several times in both sums.
        square_T1 = self.ranks.all_reduce(x_TO.square().sum(-1, keepdim=True))
        scaled_TO = x_TO * torch.rsqrt(square_T1 / self.num_features + self.eps)
        return (scaled_TO * self.weight).to(x_THS.dtype).view(x_THS.shape)


class HeadWeightsNorm(nn.Module):
    """Layer norm of each head without a bias; every head has its own weights, [H, S].

    shards: this rank's part of the heads; read by the weight loader.
    """

    def __init__(self, context: ModelContext, features: Shard, head_size: int, eps: float) -> None:
        super().__init__()
        start, size, whole = (
            count // head_size for count in (features.start, features.size, features.whole)
        )
        weight_HS = torch.empty(size, head_size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(weight_HS, requires_grad=False)
        self.shards = {"weight": Shard(start=start, size=size, whole=whole)}
        self.eps = eps

    def forward(self, x_THS: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads, [T, H, S]."""
        x = x_THS.float()
        centered = x - x.mean(-1, keepdim=True)
        scale = torch.rsqrt(centered.square().mean(-1, keepdim=True) + self.eps)
        return (centered * scale * self.weight).to(x_THS.dtype)


class HeadNorms(nn.Module):
    """Layer norm of each head without a bias; every head is a separate module, `norms.N`.

    elsewhere: names of the parameters that only other ranks have.
    """

    def __init__(self, context: ModelContext, features: Shard, head_size: int, eps: float) -> None:
        super().__init__()
        start, size, whole = (
            count // head_size for count in (features.start, features.size, features.whole)
        )
        own = range(start, start + size)
        self.norms = nn.ModuleDict(
            {str(head): LayerNorm(context, head_size, eps, has_bias=False) for head in own}
        )
        self.elsewhere = frozenset(
            f"norms.{head}.weight" for head in range(whole) if head not in own
        )
        self.eps = eps

    def forward(self, x_THS: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads, [T, H, S]."""
        weight_HS = torch.stack([norm.weight for norm in self.norms.values()])
        normal_THS = functional.layer_norm(x_THS, x_THS.shape[-1:], None, None, self.eps)
        return normal_THS * weight_HS

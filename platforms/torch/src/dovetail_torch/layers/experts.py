"""Mixture of experts: the router, and the experts of a layer.

A router selects some experts for each token; the layer returns the weighted sum of their outputs.
The weights of all experts are stacked in two linear layers if the linear method computes them in
one call (capability "experts"); otherwise each expert has separate linear layers. The names in
checkpoints are the same: `experts.N.gate_proj`, `up_proj` and `down_proj`.
Ranks shard the intermediate features of every expert.
Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961.
Dimensions: T tokens, D hidden size, E experts, K experts per token, I intermediate features,
G gate and up features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dovetail.interfaces.linear_method import EXPERTS, AppliesExperts, ExpertLayers
from dovetail.interfaces.model import ModelContext
from dovetail.interfaces.ops import ExpertRouting, RouterWeights
from dovetail_torch.distributed.shard import Shard, shard_evenly, unsharded
from dovetail_torch.layers.expert_groups import activate, group_tokens
from dovetail_torch.layers.linear import MergedColumnParallelLinear, ParallelLinear


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The sizes of a layer's experts; at least two experts.

    limit, alpha: parameters of the activation; see `dovetail.interfaces.ops.ExpertWeights`.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.702


class Router(nn.Module):
    """Selects the experts of each token with the context's ops. Never quantized.

    weight: [E, D]; bias: [E] or None. e_score_correction_bias: float32 [E], or None without
    `has_correction`.
    """

    def __init__(
        self,
        context: ModelContext,
        sizes: tuple[int, int],
        routing: ExpertRouting,
        *,
        bias: bool = False,
        has_correction: bool = False,
    ) -> None:
        """sizes: number of experts, hidden size."""
        super().__init__()
        self.ops, self.routing = context.ops, routing

        def parameter(*shape: int, dtype: torch.dtype = context.dtype) -> nn.Parameter:
            values = torch.empty(shape, dtype=dtype, device=context.device)
            return nn.Parameter(values, requires_grad=False)

        self.weight = parameter(*sizes)
        self.bias = parameter(sizes[0]) if bias else None
        correction = parameter(sizes[0], dtype=torch.float32) if has_correction else None
        self.e_score_correction_bias = correction

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the experts of each token, int64 [T, K], and their weights, float32 [T, K]."""
        weights = RouterWeights(
            weight_ED=self.weight, bias_E=self.bias, correction_E=self.e_score_correction_bias
        )
        return self.ops.select_experts(x_TD, weights, self.routing)


class FusedExperts(nn.Module):
    """The experts of a layer in two stacked linear layers.

    elsewhere: names of the parameters that only other ranks have.
    """

    def __init__(self, context: ModelContext, name: str, shape: ExpertShape) -> None:
        super().__init__()
        inner, experts = _inner(context, name, shape), range(shape.num_experts)
        self.gate_up_proj = ParallelLinear(
            context,
            f"{name}.gate_up_proj",
            shape.hidden_size,
            {f"{expert}.{half}_proj": inner for expert in experts for half in ("gate", "up")},
            bias=shape.bias,
            num_experts=shape.num_experts,
        )
        has_bias = shape.bias and context.ranks.rank == 0
        self.down_proj = ParallelLinear(
            context,
            f"{name}.down_proj",
            inner,
            {f"{expert}.down_proj": unsharded(shape.hidden_size) for expert in experts},
            bias=has_bias,
            num_experts=shape.num_experts,
        )
        self.elsewhere: frozenset[str] = frozenset()
        if shape.bias and not has_bias:
            self.elsewhere = frozenset(f"{expert}.down_proj.bias" for expert in experts)
        self.ranks = context.ranks
        self.method: AppliesExperts = context.linear_method  # type: ignore[assignment]
        self.ops, self.limit, self.alpha = context.ops, shape.limit, shape.alpha

    def forward(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs, [T, D], summed over all ranks."""
        layers = ExpertLayers(
            gate_up=self.gate_up_proj,
            down=self.down_proj,
            ops=self.ops,
            limit=self.limit,
            alpha=self.alpha,
        )
        y_TD = self.method.apply_experts(layers, x_TD, experts_TK, weights_TK)
        return self.ranks.all_reduce(y_TD)


class SeparateExperts(nn.ModuleDict):
    """The experts of a layer as modules, for linear methods without the capability "experts"."""

    def __init__(self, context: ModelContext, name: str, shape: ExpertShape) -> None:
        inner = _inner(context, name, shape)
        names = [str(expert) for expert in range(shape.num_experts)]
        super().__init__({e: _Expert(context, f"{name}.{e}", shape, inner) for e in names})
        self.ranks = context.ranks

    def forward(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts' outputs, [T, D], summed over all ranks."""
        groups = group_tokens(x_TD, experts_TK, weights_TK, len(self))
        for expert, rows_ND in groups:
            groups.put(expert, self[str(expert)](rows_ND))
        return self.ranks.all_reduce(groups.total())


class _Expert(nn.Module):
    """One expert. `down_proj` returns this rank's part of the sum."""

    def __init__(self, context: ModelContext, name: str, shape: ExpertShape, inner: Shard) -> None:
        super().__init__()
        parts = {f"{half}_proj": inner.whole for half in ("gate", "up")}
        self.gate_up_proj = MergedColumnParallelLinear(
            context, f"{name}.gate_up_proj", shape.hidden_size, parts, bias=shape.bias
        )
        has_bias = shape.bias and context.ranks.rank == 0
        self.down_proj = ParallelLinear(
            context, f"{name}.down_proj", inner, {"down_proj": shape.hidden_size}, bias=has_bias
        )
        if shape.bias and not has_bias:
            self.down_proj.elsewhere = frozenset({"bias"})
        self.limit, self.alpha = shape.limit, shape.alpha

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the output of the expert, [N, D]."""
        return self.down_proj(activate(self.gate_up_proj(x_ND), self.limit, self.alpha))


def make_experts(
    context: ModelContext, name: str, shape: ExpertShape
) -> FusedExperts | SeparateExperts:
    """Return the experts of a layer. name: their path in the model, "model.layers.0.mlp.experts".

    Raises ConfigError if the intermediate features cannot be sharded evenly.
    """
    is_fused = EXPERTS in type(context.linear_method).provides
    return (FusedExperts if is_fused else SeparateExperts)(context, name, shape)


def _inner(context: ModelContext, name: str, shape: ExpertShape) -> Shard:
    size = shape.intermediate_size
    return shard_evenly(size, context.ranks, f"the {size} intermediate features of {name}")

"""The MLP of a layer with experts: a router, experts, and perhaps a shared expert.

Dimensions: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail.interfaces.ops import ExpertRouting
from dovetail_models.config_reader import Config, read_count, read_num_layers
from dovetail_models.decoder.mlp import GatedMLP
from dovetail_models.decoder.shape import DecoderShape
from dovetail_torch.layers import ExpertShape, Router, make_experts

MAX_EXPERTS = 4096
"""The maximum number of experts of a layer; a larger number is treated as an error in the file."""
MAX_ALL_EXPERTS = 1 << 17
"""The maximum number of experts of all layers, whose weights are listed before a file is read."""


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """The options in which the expert layers of the families differ.

    num_experts, intermediate_size, bias, limit, alpha: see `ExpertShape`. routing: how a token's
    experts are selected. router_bias, has_correction: see `Router`. router_name: the module's name.
    shared_size: intermediate size of the shared expert, which all tokens use; 0 for none.
    shared_gate: whether its output is multiplied by a sigmoid gate, computed from the token.
    scales_input: whether the weight of an expert multiplies its input instead of its output.
    """

    num_experts: int
    intermediate_size: int
    routing: ExpertRouting
    bias: bool = False
    limit: float = 0.0
    alpha: float = 1.702
    router_bias: bool = False
    has_correction: bool = False
    router_name: str = "gate"
    shared_size: int = 0
    shared_gate: bool = False
    scales_input: bool = False


class SparseMLP(nn.Module):
    """The weighted sum of each token's experts, plus the shared expert.

    Source: Dai et al. 2024, arXiv:2401.06066 (shared experts).
    """

    def __init__(
        self, context: ModelContext, name: str, shape: DecoderShape, options: ExpertOptions
    ) -> None:
        super().__init__()
        router = Router(
            context,
            (options.num_experts, shape.hidden_size),
            options.routing,
            bias=options.router_bias,
            has_correction=options.has_correction,
        )
        self.router_name, self.scales_input = options.router_name, options.scales_input
        self.add_module(options.router_name, router)
        experts = ExpertShape(
            num_experts=options.num_experts,
            hidden_size=shape.hidden_size,
            intermediate_size=options.intermediate_size,
            bias=options.bias,
            limit=options.limit,
            alpha=options.alpha,
        )
        self.experts = make_experts(context, f"{name}.experts", experts)
        self.ops = context.ops
        self.shared_expert: nn.Module | None = None
        self.shared_expert_gate: TokenGate | None = None
        if options.shared_size:
            sizes = replace(shape, intermediate_size=options.shared_size)
            self.shared_expert = GatedMLP(context, f"{name}.shared_expert", sizes)
        if options.shared_gate:
            self.shared_expert_gate = TokenGate(context, shape.hidden_size)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP, [T, D]."""
        experts_TK, weights_TK = self.get_submodule(self.router_name)(x_TD)
        if self.scales_input:
            y_TD = self._sum_of_scaled(x_TD, experts_TK, weights_TK)
        else:
            y_TD = self.experts(x_TD, experts_TK, weights_TK)
        if self.shared_expert is None:
            return y_TD
        gate = self.shared_expert_gate
        gate_D = None if gate is None else gate.weight[0]
        return self.ops.add_shared_expert(y_TD, self.shared_expert(x_TD), x_TD, gate_D)

    def _sum_of_scaled(
        self, x_TD: torch.Tensor, experts_TK: torch.Tensor, weights_TK: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of expert(weight · x): each pair of token and expert is a row."""
        scaled_TKD = x_TD.unsqueeze(1) * weights_TK.to(x_TD.dtype).unsqueeze(2)
        experts_N1, ones_N1 = experts_TK.reshape(-1, 1), torch.ones_like(weights_TK).view(-1, 1)
        y_ND = self.experts(scaled_TKD.flatten(0, 1), experts_N1, ones_N1)
        y_TD: torch.Tensor = y_ND.unflatten(0, experts_TK.shape).sum(1)
        return y_TD


class TokenGate(nn.Module):
    """The weight w of a gate between 0 and 1 for each token, sigmoid(x · w). Never quantized."""

    def __init__(self, context: ModelContext, hidden_size: int) -> None:
        super().__init__()
        values = torch.empty(1, hidden_size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(values, requires_grad=False)


def sparse_mlp(options: ExpertOptions) -> Callable[[ModelContext, str, DecoderShape], SparseMLP]:
    """Return a factory for `SparseMLP` for `DecoderShape.mlp`."""
    return lambda context, name, shape: SparseMLP(context, name, shape, options)


def read_num_experts(config: Config, default: int | None = None) -> int:
    """Return the number of experts of a layer, at least 2: num_experts or num_local_experts."""
    field = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    if config.get(field) is None:
        field = "num_experts"
    num_experts = read_count(config, field, default, minimum=2)
    check_num_experts(config, field, num_experts)
    return num_experts


def check_num_experts(config: Config, field: str, num_experts: int) -> None:
    """Raise ModelError, naming the field, if a layer or the whole model has too many experts."""
    if num_experts > MAX_EXPERTS:
        raise ModelError(
            f"config.json: {field} is {num_experts}; at most {MAX_EXPERTS} experts are supported"
        )
    num_layers = read_num_layers(config)
    if num_experts * num_layers > MAX_ALL_EXPERTS:
        raise ModelError(
            f"config.json: {field} is {num_experts} and num_hidden_layers is {num_layers}; at most "
            f"{MAX_ALL_EXPERTS} experts in all layers are supported"
        )


def read_top_k(config: Config, num_experts: int, default: int | None = None) -> int:
    """Return num_experts_per_tok, at most the number of experts."""
    top_k = read_count(config, "num_experts_per_tok", default)
    if top_k > num_experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {top_k}, but a layer has {num_experts} experts"
        )
    return top_k


def read_sparse_layers(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts, from decoder_sparse_step and mlp_only_layers."""
    step = read_count(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    is_valid = isinstance(dense, list | tuple) and all(type(index) is int for index in dense)
    if not is_valid or not all(0 <= index < num_layers for index in dense):
        raise ModelError(
            f"config.json: mlp_only_layers is {str(dense)[:80]}; it must be a list of layer "
            f"indices, from 0 to {num_layers - 1}"
        )
    return tuple(index not in dense and not (index + 1) % step for index in range(num_layers))

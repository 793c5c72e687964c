"""Second moments of the inputs of linear layers, collected while the model runs on a text.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail_quantize.opened_model import OpenedModel
from dovetail_torch.layers import FusedExperts
from dovetail_torch.layers.expert_groups import activate, group_tokens
from dovetail_torch.layers.linear import ParallelLinear


@dataclass
class Moments:
    """Second moments of a layer's inputs x. products_II: the sum of x · xᵀ over tokens, float32.

    num_tokens: the number of tokens in the sum.
    """

    products_II: torch.Tensor
    num_tokens: int = 0

    def add(self, x_TI: torch.Tensor) -> None:
        """Add a layer's inputs for more tokens."""
        x_TI = x_TI.float()
        self.products_II.addmm_(x_TI.T, x_TI)
        self.num_tokens += len(x_TI)

    @property
    def mean_squares(self) -> torch.Tensor:
        """The mean square of each feature, float32 [I], clamped to at least 1e-6 of the largest."""
        squares_I = self.products_II.diagonal() / max(1, self.num_tokens)
        return squares_I.clamp(min=float(squares_I.max()) * 1e-6 + 1e-30)

    def scaled(self, scale_I: torch.Tensor) -> Moments:
        """Return the moments of inputs that are divided by a scale."""
        products_II = self.products_II / scale_I[:, None] / scale_I
        return Moments(products_II, self.num_tokens)

    def squares(self, weight_OI: torch.Tensor, rounded_OI: torch.Tensor) -> torch.Tensor:
        """Return the squared norms of the outputs' error and of the outputs, float32 [2]."""
        change_OI, weight_OI = rounded_OI.float() - weight_OI.float(), weight_OI.float()
        changed = ((change_OI @ self.products_II) * change_OI).sum().clamp(min=0)
        whole = ((weight_OI @ self.products_II) * weight_OI).sum()
        return torch.stack((changed, whole))

    def relative_error(self, weight_OI: torch.Tensor, rounded_OI: torch.Tensor) -> float:
        """Return the relative output error (norm of the error / norm of the outputs)."""
        return relative_norm(self.squares(weight_OI, rounded_OI))


AllMoments = dict[ParallelLinear, list[Moments]]
"""The moments of each layer: one item per expert; one item for a layer without experts."""


def relative_norm(squares: torch.Tensor) -> float:
    """Return the ratio of two norms, given their squares; see `Moments.squares`."""
    return float((squares[0] / squares[1].clamp(min=1e-30)).sqrt())


@torch.inference_mode()
def collect_moments(
    opened: OpenedModel, layers: Iterable[ParallelLinear], chunks: Sequence[Sequence[int]]
) -> AllMoments:
    """Run the model on all chunks and return the moments of these layers; see `AllMoments`.

    Raises WeightError if a layer has inputs that are NaN or infinite.
    """
    found: AllMoments = {}
    for layer in layers:
        size = layer.shape.in_features
        found[layer] = [Moments(torch.zeros(size, size)) for _ in range(layer.shape.num_experts)]
    handles = [
        layer.register_forward_pre_hook(_adding(moments[0]))
        for layer, moments in found.items()
        if layer.shape.num_experts == 1
    ]
    handles += [
        module.register_forward_pre_hook(_adding_experts(module, found))
        for module in opened.module.modules()
        if isinstance(module, FusedExperts) and module.gate_up_proj in found
    ]
    try:
        for chunk in chunks:
            opened.run(chunk)
    finally:
        for handle in handles:
            handle.remove()
    for layer, moments in found.items():
        if not all(bool(each.products_II.isfinite().all()) for each in moments):
            raise WeightError(
                f"{layer.shape.name}: its inputs on the calibration data are NaN or infinite; the "
                "model is damaged, or its activations overflow bfloat16."
            )
    return found


def _adding(moments: Moments) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def add(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        moments.add(inputs[0].detach())

    return add


def _adding_experts(
    experts: FusedExperts, found: Mapping[ParallelLinear, Sequence[Moments]]
) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    """Return a hook that adds the inputs of both linear layers of every expert that has tokens."""
    gate_up, down = experts.gate_up_proj, experts.down_proj

    def add(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x_TD, experts_TK, weights_TK = inputs
        weight_EGD = gate_up.weight.unflatten(0, (gate_up.shape.num_experts, -1))
        for expert, rows_ND in group_tokens(x_TD, experts_TK, weights_TK, len(weight_EGD)):
            found[gate_up][expert].add(rows_ND)
            inner_NI = activate(rows_ND @ weight_EGD[expert].T, experts.limit, experts.alpha)
            found[down][expert].add(inner_NI)

    return add

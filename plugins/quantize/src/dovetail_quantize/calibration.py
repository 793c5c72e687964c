"""Second moments of the inputs of linear layers, from runs of the model on a text.

Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dovetail.errors import WeightError
from dovetail_quantize.opened_model import OpenedModel
from dovetail_torch.layers.linear import ParallelLinear


@dataclass
class Moments:
    """Sums over tokens. products_II: the sum of x · xᵀ, float32.

    num_tokens: the number of tokens.
    """

    products_II: torch.Tensor
    num_tokens: int = 0

    def add(self, x_TI: torch.Tensor) -> None:
        """Add the inputs of a layer for further tokens."""
        x_TI = x_TI.float()
        self.products_II.addmm_(x_TI.T, x_TI)
        self.num_tokens += len(x_TI)

    @property
    def mean_squares(self) -> torch.Tensor:
        """The mean square of each feature, float32 [I], at least a millionth of the largest."""
        squares_I = self.products_II.diagonal() / max(1, self.num_tokens)
        return squares_I.clamp(min=float(squares_I.max()) * 1e-6 + 1e-30)

    def scaled(self, scale_I: torch.Tensor) -> Moments:
        """Return the moments of inputs that are divided by a scale."""
        products_II = self.products_II / scale_I[:, None] / scale_I
        return Moments(products_II, self.num_tokens)

    def relative_error(self, weight_OI: torch.Tensor, rounded_OI: torch.Tensor) -> float:
        """Return the norm of the outputs' change, divided by the norm of the outputs."""
        change_OI, weight_OI = rounded_OI.float() - weight_OI.float(), weight_OI.float()
        changed = ((change_OI @ self.products_II) * change_OI).sum().clamp(min=0)
        whole = ((weight_OI @ self.products_II) * weight_OI).sum().clamp(min=1e-30)
        return float((changed / whole).sqrt())


@torch.inference_mode()
def collect_moments(
    opened: OpenedModel, layers: Iterable[ParallelLinear], chunks: Sequence[Sequence[int]]
) -> dict[ParallelLinear, Moments]:
    """Run the model on all chunks and return the moments of these layers.

    Raises WeightError if a layer has inputs that are NaN or infinite.
    """
    found: dict[ParallelLinear, Moments] = {}
    handles = []
    for layer in layers:
        size = layer.shape.in_features
        found[layer] = moments = Moments(torch.zeros(size, size))
        handles.append(layer.register_forward_pre_hook(_adding(moments)))
    try:
        for chunk in chunks:
            opened.run(chunk)
    finally:
        for handle in handles:
            handle.remove()
    for layer, moments in found.items():
        if not bool(moments.products_II.isfinite().all()):
            raise WeightError(
                f"{layer.shape.name}: its inputs on the calibration text are NaN or infinite; the "
                "model is damaged, or its numbers do not fit bfloat16."
            )
    return found


def _adding(moments: Moments) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def add(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        moments.add(inputs[0].detach())

    return add

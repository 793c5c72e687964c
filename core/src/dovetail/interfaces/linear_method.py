"""The contract of a linear method: how linear layers store and apply their weights.

Plain, packed and quantized weights all use this contract. A layer goes through four phases:
`create` (parameters as in the checkpoint), loading (by the weight loader), `pack` (once, after
loading), `apply` (in each step).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dovetail.interfaces.ops import Ops


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """The description of a linear layer, y = x · Wᵀ + b.

    part_names, part_sizes: names and output features of the checkpoint's linear layers that are
    fused along the output; one entry for a layer that is not fused.
    num_experts: 1 for a linear layer; otherwise the weights of this many experts are stacked along
    the output, and each expert has an equal part of `part_names`. Only for linear methods with the
    capability "experts".
    """

    name: str
    in_features: int
    part_names: tuple[str, ...]
    part_sizes: tuple[int, ...]
    bias: bool
    dtype: torch.dtype
    device: torch.device
    num_experts: int = 1

    @property
    def out_features(self) -> int:
        """Number of output features of all parts together."""
        return sum(self.part_sizes)


EXPERTS = "experts"
"""Capability id of linear methods that implement `AppliesExperts`; declared in `provides`."""


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """The stacked layers of experts, created by `LinearMethod.create` with `num_experts` above 1.

    gate_up: the layer from D to the gate and up features of each expert. down: the layer back to D.
    limit, alpha: see `ExpertWeights`. ops: computes with unpacked weights (`Ops.fused_experts`).
    """

    gate_up: nn.Module
    down: nn.Module
    ops: Ops
    limit: float = 0.0
    alpha: float = 1.702


class AppliesExperts(Protocol):
    """Capability "experts": the method computes all experts of a layer in one call.

    For other methods, each expert is a separate linear layer, which is slower.
    """

    def apply_experts(
        self,
        layers: ExpertLayers,
        x_TD: torch.Tensor,
        experts_TK: torch.Tensor,
        weights_TK: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts; see `fused_experts`."""


ACTIVATION = "activation"
"""Capability id of linear methods that implement `AppliesActivation`; declared in `provides`."""

ACTIVATIONS = frozenset({"gelu", "gelu_tanh", "relu", "silu"})
"""Activations of `AppliesActivation`: `gelu` is x · Φ(x), and `gelu_tanh` approximates it by tanh.

Sources: Hendrycks and Gimpel 2016, arXiv:1606.08415; Elfwing et al. 2017, arXiv:1702.03118.
"""


class AppliesActivation(Protocol):
    """Capability "activation": the method computes a layer and an activation in one call.

    With other methods, a separate activation reads and writes the output of the layer again.
    """

    def apply_activation(
        self, layer: nn.Module, x_TI: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Return activation(x · Wᵀ + b), [T, out_features]. activation: one of `ACTIVATIONS`."""


class LinearMethod(ABC):
    """Stores and applies the weights of linear layers. One instance serves a whole model."""

    CONTRACT: ClassVar[str] = "linear_method"
    CONTRACT_VERSION: ClassVar[str] = "0.4"
    device_types: ClassVar[frozenset[str]] = frozenset()
    """Supported device types; empty for any."""
    dtypes: ClassVar[frozenset[str]] = frozenset()
    """Names of the supported dtypes of layers; empty for any."""
    error: ClassVar[float] = 0.0
    """Error that quantization adds to a matrix product of values near 1, without rounding errors of
    the dtype."""
    batch_invariant: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes for which the result of a row is bitwise independent of other rows."""
    provides: ClassVar[frozenset[str]] = frozenset()
    """Capability ids."""

    def __init__(self) -> None:  # noqa: B027  # optional to override
        """Create the method.

        If the plugin has an options model, this method must accept the keyword `options=None`: the
        validated options as a mapping.
        """

    @abstractmethod
    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register the parameters on `layer` that the weight loader fills.

        Each parameter's first dimension is the output features of all parts, in order.
        """

    @abstractmethod
    def pack(self, layer: nn.Module) -> None:
        """Convert the loaded weights to the layout of `apply`. Called once."""

    @abstractmethod
    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b: [T, in_features] to [T, out_features]."""

"""The contract of a linear method: how the weights of linear layers are kept and applied.

Quantisation and packing are the same seam. A method is a build transform in four acts: `create`
(parameters as the checkpoint has them), load (by the weight loader), `pack` (once, after loading),
`apply` (each step).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class LinearShape:
    """What a linear layer is: y = x · Wᵀ + b.

    part_names, part_sizes: the checkpoint's own linears that are fused here along the output, with
        their output features; one entry for a layer that stands alone.
    """

    name: str
    in_features: int
    part_names: tuple[str, ...]
    part_sizes: tuple[int, ...]
    bias: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def out_features(self) -> int:
        """Output features of all parts."""
        return sum(self.part_sizes)


class LinearMethod(ABC):
    """Keeps and applies the weights of linear layers. One instance serves a whole model."""

    CONTRACT: ClassVar[str] = "linear_method"
    CONTRACT_VERSION: ClassVar[str] = "0.2"
    device_types: ClassVar[frozenset[str]] = frozenset()
    """Device types it runs on; empty for any."""
    dtypes: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes of layers that it takes; empty for any."""
    error: ClassVar[float] = 0.0
    """What quantising costs: how far a product of order 1 may be off beyond the dtype itself."""
    batch_invariant: ClassVar[frozenset[str]] = frozenset()
    """Names of the dtypes in which a row's result has the same bits whatever the other rows."""

    def __init__(self) -> None:  # noqa: B027  # a default that may stay
        """Make it, without arguments.

        A plugin with an options model takes the keyword `options=None`: a mapping, validated.
        """

    @abstractmethod
    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register on `layer` the parameters that a checkpoint fills.

        Each parameter's first dimension is the output features of all parts, in order.
        """

    @abstractmethod
    def pack(self, layer: nn.Module) -> None:
        """Bring the loaded weights into the form that `apply` wants. Called once."""

    @abstractmethod
    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b: [T, in_features] to [T, out_features]."""

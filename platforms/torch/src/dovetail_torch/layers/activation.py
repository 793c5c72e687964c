"""Activations between two linear layers, with the names of config.json.

Dimensions: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.model import ModelContext

_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
}
"""Activations by their names in config.json; `gelu` is exact, the others of its name use tanh.

Sources: Hendrycks and Gimpel 2016, arXiv:1606.08415; Elfwing et al. 2017, arXiv:1702.03118.
"""


FUSED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}
"""Activations by their names in `dovetail.interfaces.linear_method.ACTIVATIONS`."""
_FUSED_NAMES = {function: name for name, function in FUSED.items()}


class Activation(nn.Module):
    """Computes an activation of `ACTIVATIONS`: [T, D] to [T, D].

    fused_name: its name in `dovetail.interfaces.linear_method.ACTIVATIONS`.
    """

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]
        self.fused_name = _FUSED_NAMES[self.function]

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the activations, a new tensor [T, D]."""
        return self.function(x_TD)


class GatedActivation(nn.Module):
    """Computes activation(gate) · up from concatenated gate and up: [T, 2·D] to [T, D].

    Source: Shazeer 2020, arXiv:2002.05202.
    """

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        self.function = ACTIVATIONS[name]

    def forward(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return the activations, a new tensor [T, D]."""
        gate_TD, up_TD = x_T2D.chunk(2, dim=-1)
        return self.function(gate_TD).mul_(up_TD)


class GeluTanhAndMul(nn.Module):
    """Computes gelu(gate) · up from concatenated gate and up with the context's ops, by tanh.

    Source: Shazeer 2020, arXiv:2002.05202 (GEGLU).
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.ops = context.ops

    def forward(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return the activations, [T, D]. `x_T2D` may be overwritten."""
        gate_TD, up_TD = x_T2D.chunk(2, dim=-1)
        return self.ops.gelu_tanh_and_mul(up_TD, gate_TD)


class SiluAndMul(nn.Module):
    """Computes silu(gate) · up from concatenated gate and up with the context's ops.

    Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU).
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.ops = context.ops

    def forward(self, x_T2D: torch.Tensor) -> torch.Tensor:
        """Return the activations, [T, D]."""
        return self.ops.silu_and_mul(x_T2D)


def gated_activation(context: ModelContext, name: str) -> nn.Module:
    """Return the gated activation `name`, with the fused op if there is one."""
    if ACTIVATIONS[name] is functional.silu:
        return SiluAndMul(context)
    if ACTIVATIONS[name] is _gelu_tanh:
        return GeluTanhAndMul(context)
    return GatedActivation(context, name)

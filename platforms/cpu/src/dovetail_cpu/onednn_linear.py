"""Linear layers with weights in oneDNN's packed order, reordered once after loading.

oneDNN reorders an unpacked weight in each call, which is most of the cost of a step with few
tokens. Measured on one core (bf16, 1,024 → 6,144): one token takes 845 µs unpacked and 300 µs
packed, 16 tokens take 1,168 and 690 µs, 1,024 tokens 28.2 and 26.3 ms.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from dovetail.interfaces.linear_method import ACTIVATION, EXPERTS, LinearShape
from dovetail_torch.layers.activation import FUSED
from dovetail_torch.layers.torch_linear import TorchLinearMethod

_TOKENS_HINT = 16
"""Number of tokens for which oneDNN chooses the order; other numbers are slower but correct."""
_POST_OPS: dict[str, tuple[str, list[float], str]] = {
    "": ("none", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "relu": ("relu", [], ""),
    "silu": ("swish", [], ""),
}
"""Arguments of torch's oneDNN operation by activation."""


class OneDNNLinearMethod(TorchLinearMethod):
    """Parameters have the checkpoint's layout until `pack`; then only the packed weight exists.

    If oneDNN cannot multiply in the model's dtype on this processor, the unpacked weight is kept
    and used. The weights of stacked experts are always kept: oneDNN packs whole weights only.
    """

    device_types: ClassVar[frozenset[str]] = frozenset({"cpu"})
    provides: ClassVar[frozenset[str]] = frozenset({EXPERTS, ACTIVATION})

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        """Register `weight` and `bias` as in the checkpoint."""
        super().create(layer, shape)
        layer.is_stacked = shape.num_experts > 1

    def pack(self, layer: nn.Module) -> None:
        """Reorder the weight and free the unpacked weight.

        If the layer is an LM head tied to an embedding, only the reference is dropped: the
        embedding owns the weight.
        """
        weight_OI = layer.weight
        if layer.is_stacked or not packs(weight_OI.dtype):
            return
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), _TOKENS_HINT)
        layer.packed_weight = packed
        del layer.weight

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x · Wᵀ + b, contiguous."""
        packed = layer.__dict__.get("packed_weight")
        return super().apply(layer, x_TI) if packed is None else _product(layer, x_TI, "")

    def apply_activation(
        self, layer: nn.Module, x_TI: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Return activation(x · Wᵀ + b), contiguous."""
        if layer.__dict__.get("packed_weight") is None:
            return FUSED[activation](super().apply(layer, x_TI))
        return _product(layer, x_TI, activation)


def _product(layer: nn.Module, x_TI: torch.Tensor, activation: str) -> torch.Tensor:
    multiply = _multiply_opaque if torch.compiler.is_compiling() else _multiply
    return multiply(x_TI, layer.packed_weight, layer.bias, activation)


def _multiply(
    x_TI: torch.Tensor, packed_OI: torch.Tensor, bias_O: torch.Tensor | None, activation: str
) -> torch.Tensor:
    product_TO: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x_TI, packed_OI, bias_O, *_POST_OPS[activation]
    )
    return product_TO


# Inductor lowers oneDNN's operation only for weights that are constants of the graph.
_multiply_opaque = torch.library.custom_op(
    "dovetail_cpu::onednn_linear", _multiply, mutates_args=()
)


@_multiply_opaque.register_fake
def _(
    x_TI: torch.Tensor, packed_OI: torch.Tensor, bias_O: torch.Tensor | None, activation: str
) -> torch.Tensor:
    return x_TI.new_empty(x_TI.shape[0], packed_OI.shape[0])


def packs(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies in this dtype on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32

"""The conformance case of linear methods with the capability "experts".

This module compares the outputs of experts with those of loops in float64, for several
numbers of tokens and sizes that are not multiples of a kernel's blocks. torch is imported within
functions. Dimensions: T tokens, D hidden size, G gate and up features, I intermediate features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.linear_method import ExpertLayers, LinearMethod, LinearShape
from dovetail_devkit.comparison import TOLERANCES, expect_close
from dovetail_devkit.expectation import expect
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.ops.experts import SIZES, SLACK, expert_sums, make_experts

if TYPE_CHECKING:
    import torch
    from torch import nn

Fill = Callable[["nn.Module", "torch.Tensor", "torch.Tensor | None"], None]
"""A function that copies a weight [O, I] and a bias ([O] or None) to a layer's parameters."""


def fill_plainly(layer: nn.Module, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
    """Copy to the parameters `weight` and `bias`: the default `Fill` for most methods."""
    import torch

    parameters = dict(layer.named_parameters(recurse=False))
    expected = {"weight"} if bias_O is None else {"weight", "bias"}
    expect(
        set(parameters) == expected,
        f"create() registers {sorted(parameters)}; expected {sorted(expected)}",
    )
    with torch.no_grad():
        parameters["weight"].copy_(weight_OI)
        if bias_O is not None:
            parameters["bias"].copy_(bias_O)


def check_experts(
    method_cls: type[LinearMethod], device: torch.device, dtype: str, fill: Fill
) -> None:
    """Check the output of `apply_experts` in all cases. Raise AssertionError at the first error."""
    method: Any = method_cls()
    for sizes in SIZES.values():
        x_TD, experts_TK, weights_TK, weights = make_experts(sizes, dtype, device)
        want_TD = expert_sums(x_TD, experts_TK, weights_TK, weights)
        layers = ExpertLayers(
            gate_up=_layer(method, "gate_up", weights.gate_up_EGD, weights.gate_up_bias_EG, fill),
            down=_layer(method, "down", weights.down_EDI, weights.down_bias_ED, fill),
            ops=FakeOps(),
            limit=weights.limit,
        )
        slack = SLACK + 2 * method.error / TOLERANCES[dtype]
        for count in {1, sizes.tokens}:
            got_TD = method.apply_experts(
                layers, x_TD[:count], experts_TK[:count], weights_TK[:count]
            )
            what = f"apply_experts of {count} tokens, {sizes}"
            expect_close(got_TD, want_TD[:count], dtype=dtype, what=what, slack=slack)


def _layer(
    method: LinearMethod,
    name: str,
    weight_EOI: torch.Tensor,
    bias_EO: torch.Tensor | None,
    fill: Fill,
) -> nn.Module:
    """Return the packed layer of all experts; the layer of gate and up has two parts per expert."""
    from torch import nn

    num_experts, num_outputs, num_inputs = weight_EOI.shape
    parts = ("gate", "up") if name == "gate_up" else ("down",)
    shape = LinearShape(
        name=f"layers.0.experts.{name}_proj",
        in_features=num_inputs,
        part_names=tuple(f"{e}.{part}_proj" for e in range(num_experts) for part in parts),
        part_sizes=(num_outputs // len(parts),) * (num_experts * len(parts)),
        bias=bias_EO is not None,
        dtype=weight_EOI.dtype,
        device=weight_EOI.device,
        num_experts=num_experts,
    )
    layer: Any = nn.Module()
    layer.shape = shape
    method.create(layer, shape)
    fill(layer, weight_EOI.flatten(0, 1), None if bias_EO is None else bias_EO.flatten())
    method.pack(layer)
    return layer

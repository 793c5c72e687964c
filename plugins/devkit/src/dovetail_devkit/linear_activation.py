"""The conformance case of linear methods with the capability "activation".

Compares every activation of a layer with float64. torch is imported within functions.
Dimensions: T tokens, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.linear_method import ACTIVATIONS, LinearMethod, LinearShape
from dovetail_devkit.comparison import TOLERANCES, exact, expect_close, random_tensor
from dovetail_devkit.expectation import expect
from dovetail_devkit.linear_experts import Fill

if TYPE_CHECKING:
    import torch

SHAPES = ((33, 7, True), (64, 96, False), (128, 80, True))
"""Input features, output features, and whether the layer has a bias."""
NUM_TOKENS = (1, 5, 40, 300)
SLACK = 4.0


def exact_activations() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the activations by name, for float64."""
    from torch.nn import functional

    return {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "relu": functional.relu,
        "silu": functional.silu,
    }


def check_activations(
    method_cls: type[LinearMethod], device: torch.device, dtype: str, fill: Fill
) -> None:
    """Check the activations of all shapes. Raise AssertionError with the first difference."""
    import torch
    from torch import nn

    method: Any = method_cls()
    functions = exact_activations()
    expect(functions.keys() == ACTIVATIONS, f"the suite has activations {sorted(functions)}")
    slack = SLACK + method.error / TOLERANCES[dtype]
    for seed, (in_features, out_features, has_bias) in enumerate(SHAPES):
        layer = nn.Module()
        method.create(
            layer,
            LinearShape(
                name="layers.0.mlp.up_proj",
                in_features=in_features,
                part_names=("up_proj",),
                part_sizes=(out_features,),
                bias=has_bias,
                dtype=getattr(torch, dtype),
                device=device,
            ),
        )

        def numbers(*shape: int, scale: float, seed: int = seed) -> torch.Tensor:
            return random_tensor(shape, dtype=dtype, device=device, seed=seed, scale=scale)

        weight_OI = numbers(out_features, in_features, scale=in_features**-0.5)
        bias_O = numbers(out_features, scale=1.0) if has_bias else None
        fill(layer, weight_OI, bias_O)
        method.pack(layer)
        for num_tokens in NUM_TOKENS:
            x_TI = numbers(num_tokens, in_features, scale=1.0)
            product_TO = exact(x_TI) @ exact(weight_OI).T
            if bias_O is not None:
                product_TO = product_TO + exact(bias_O)
            for name, function in functions.items():
                got_TO = method.apply_activation(layer, x_TI, name)
                what = f"{name} of {num_tokens} tokens, {in_features} to {out_features} features"
                expect_close(got_TO, function(product_TO), dtype=dtype, what=what, slack=slack)
                expect(got_TO.is_contiguous(), f"{what}: the result must be contiguous")

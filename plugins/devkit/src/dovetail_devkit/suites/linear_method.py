"""The conformance suite of the linear method contract, for any method on any device.

This module compares layers of several shapes, single and fused, with and without bias, with
float64. The suite fills the parameters that `create` registers; a method with different parameters
provides `fill`. torch is imported within functions.

Dimensions: T tokens, I input features, O output features of all parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from dovetail.interfaces.linear_method import ACTIVATION, EXPERTS, LinearMethod, LinearShape
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.comparison import TOLERANCES, exact, expect_close, random_tensor
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.linear_activation import check_activations
from dovetail_devkit.linear_experts import Fill, check_experts, fill_plainly

if TYPE_CHECKING:
    import torch

_SHAPES = ((16, (8,)), (33, (7, 3, 3)), (64, (48, 48)), (128, (256,)), (1, (1,)))
_NUM_TOKENS = (1, 2, 7, 40)
SLACK = 4.0
"""Factor for the tolerances, because results are sums of up to 128 products."""


@checking("linear_method")
def check_linear_method(
    method_cls: type[LinearMethod],
    device: torch.device,
    *,
    dtypes: Iterable[str] = (),
    fill: Fill = fill_plainly,
    slack: float = SLACK,
) -> None:
    """Check a linear method on `device`. Raise AssertionError with the first difference.

    dtypes: dtypes to test; () for all that the method supports. fill: writes weights to its
    parameters. slack: factor for the tolerances of `comparison`, for the error of the method.
    """
    run_all(linear_method_cases(method_cls, device, dtypes=dtypes, fill=fill, slack=slack))


def linear_method_cases(
    method_cls: type[LinearMethod],
    device: torch.device,
    *,
    dtypes: Iterable[str] = (),
    fill: Fill = fill_plainly,
    slack: float = SLACK,
) -> Iterator[Case]:
    """Yield one case per dtype. The arguments are the same as for `check_linear_method`."""

    def check_layers(dtype: str) -> None:
        types = method_cls.device_types
        on_device = not types or device.type in types
        expect(on_device, f"the method supports the devices {sorted(types)}, but not {device.type}")
        method = method_cls()
        layers = [
            _Layer(method, (seed, in_features, parts, bool(seed % 2)), dtype, device, fill)
            for seed, (in_features, parts) in enumerate(_SHAPES * 2)
        ]
        allowed = slack + method_cls.error / TOLERANCES[dtype]
        # All layers are created before the first one is applied, because one instance serves a
        # whole model.
        for layer in layers:
            layer.check(allowed)
        for layer in layers[::-1]:
            layer.check(allowed)

    for dtype in tuple(dtypes) or sorted(method_cls.dtypes or TOLERANCES):
        yield Case(name=f"layers in {dtype}", run=partial(check_layers, dtype))
        if EXPERTS in method_cls.provides:
            run = partial(check_experts, method_cls, device, dtype, fill)
            yield Case(name=f"experts in {dtype}", run=run)
        if ACTIVATION in method_cls.provides:
            run = partial(check_activations, method_cls, device, dtype, fill)
            yield Case(name=f"activations in {dtype}", run=run)


class _Layer:
    """A layer with created, filled and packed parameters."""

    def __init__(
        self,
        method: LinearMethod,
        numbers: tuple[int, int, tuple[int, ...], bool],
        dtype: str,
        device: torch.device,
        fill: Fill,
    ) -> None:
        import torch
        from torch import nn

        self._method, self._dtype, self._device = method, dtype, device
        self._seed, in_features, parts, bias = numbers
        self._shape = LinearShape(
            name="layers.0.linear",
            in_features=in_features,
            part_names=tuple(f"part_{index}" for index in range(len(parts))),
            part_sizes=parts,
            bias=bias,
            dtype=getattr(torch, dtype),
            device=device,
        )
        self._module = nn.Module()
        method.create(self._module, self._shape)
        self._check_parameters()
        self._weight_OI = self._random(self._shape.out_features, in_features)
        self._bias_O = self._random(self._shape.out_features) if bias else None
        fill(self._module, self._weight_OI, self._bias_O)
        method.pack(self._module)

    def check(self, slack: float) -> None:
        """Apply the layer to several inputs and compare the results."""
        import torch

        for num_tokens in _NUM_TOKENS:
            wide = self._random(num_tokens, 2 * self._shape.in_features)
            for x_TI in (wide[:, : self._shape.in_features], wide.chunk(2, dim=1)[1].clone()):
                before = x_TI.clone()
                expected = exact(x_TI) @ exact(self._weight_OI).T
                if self._bias_O is not None:
                    expected = expected + exact(self._bias_O)
                actual = self._method.apply(self._module, x_TI)
                shape = self._shape
                what = f"x {tuple(x_TI.shape)}, parts {shape.part_sizes}, bias={shape.bias}"
                expect_close(actual, expected, dtype=self._dtype, what=what, slack=slack)
                expect(torch.equal(x_TI, before), f"{what}: apply must not change its input")
                expect(actual.is_contiguous(), f"{what}: apply must return a contiguous tensor")

    def _check_parameters(self) -> None:
        parameters = list(self._module.named_parameters(recurse=False))
        expect(bool(parameters), "create() must register the parameters of the layer")
        for name, parameter in parameters:
            expect(
                parameter.shape[0] == self._shape.out_features,
                f"{name} has the shape {list(parameter.shape)}; its first dimension must be the "
                f"{self._shape.out_features} output features of all parts",
            )
            expect(
                parameter.device.type == self._device.type,
                f"{name} is on {parameter.device.type}; expected {self._device.type}",
            )

    def _random(self, *shape: int) -> torch.Tensor:
        scale = self._shape.in_features**-0.5 if len(shape) == 2 else 1.0
        return random_tensor(
            shape, dtype=self._dtype, device=self._device, seed=self._seed, scale=scale
        )

"""The conformance cases of layer norms, with and without weights, biases and a residual.

Compares them with float64. torch is imported within functions.
Dimensions: T tokens, D features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING

from dovetail.interfaces.ops import Ops
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import exact, expect_close, random_tensor
from dovetail_devkit.expectation import expect
from dovetail_devkit.ops.operation_cases import operation_cases

if TYPE_CHECKING:
    import torch

EPS = 1e-3
SHAPES = ((1, 64), (3, 80), (17, 33), (5, 4096), (2, 4, 32))
OFFSET = 30.0
"""An offset of the features. With values far from 0, an imprecise variance is detected."""


def layer_norm_cases(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str]
) -> Iterator[Case]:
    """Return the cases of `layer_norm` and `add_layer_norm` that the class overrides."""
    checks = {"layer_norm": _check_norm, "add_layer_norm": _check_add}
    return operation_cases(checks, ops_cls, device, dtypes=dtypes)


class _Arguments:
    """Random arguments of a shape.

    parameters: whether there is a weight, and whether there is a bias.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, device: torch.device) -> None:
        def numbers(seed: int, *sizes: int, scale: float = 1.0) -> torch.Tensor:
            return random_tensor(sizes, dtype=dtype, device=device, seed=seed, scale=scale)

        self.x, self.residual = numbers(1, *shape), numbers(2, *shape)
        self.wide = numbers(3, *shape[:-1], 3 * shape[-1])
        weight_D, bias_D = numbers(4, shape[-1]), numbers(5, shape[-1])
        self.parameters = tuple(product((weight_D, None), (bias_D, None)))


def _exact_norm(
    x: torch.Tensor, weight_D: torch.Tensor | None, bias_D: torch.Tensor | None
) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = y if weight_D is None else y * exact(weight_D)
    return y if bias_D is None else y + exact(bias_D)


def _check_norm(ops: Ops, device: torch.device, dtype: str) -> None:
    import torch

    for shape in SHAPES:
        given = _Arguments(shape, dtype, device)
        view = given.wide[..., shape[-1] : 2 * shape[-1]]
        inputs = {"": given.x, ", a view": view, ", far from 0": given.x + OFFSET}
        for (layout, x), (weight_D, bias_D) in product(inputs.items(), given.parameters):
            before = x.clone()
            got = ops.layer_norm(x, weight_D, bias_D, EPS)
            what = f"layer_norm {shape}{layout}, weight={weight_D is not None}"
            what += f", bias={bias_D is not None}"
            expect_close(got, _exact_norm(exact(x), weight_D, bias_D), dtype=dtype, what=what)
            expect(torch.equal(x, before), f"{what} must not change its input")


def _check_add(ops: Ops, device: torch.device, dtype: str) -> None:
    import torch

    for shape in SHAPES:
        given = _Arguments(shape, dtype, device)
        # The sum is rounded to the dtype first; the norm is computed from the rounded sum.
        total = exact((exact(given.x) + exact(given.residual)).to(given.x.dtype))
        for weight_D, bias_D in given.parameters:
            before = given.x.clone()
            residual = given.residual.clone()
            normed, summed = ops.add_layer_norm(given.x, residual, weight_D, bias_D, EPS)
            what = f"add_layer_norm {shape}, weight={weight_D is not None}"
            what += f", bias={bias_D is not None}"
            expect_close(summed, total, dtype=dtype, what=f"{what}, the sum")
            want = _exact_norm(total, weight_D, bias_D)
            expect_close(normed, want, dtype=dtype, what=f"{what}, the norm")
            expect(torch.equal(given.x, before), f"{what} must not change x")

"""Compares tensors with float64 references. All suites use the same table of tolerances.

The rule is |actual - expected| ≤ t · max(1, |expected|), with t from `TOLERANCES`. A
NaN is always an error. torch is imported within functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail_devkit.expectation import expect

if TYPE_CHECKING:
    import torch

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}


def expect_close(
    actual: torch.Tensor, expected: torch.Tensor, *, dtype: str, what: str, slack: float = 1.0
) -> None:
    """Raise AssertionError unless `actual` has the dtype and is close to `expected`.

    dtype: the name of the expected dtype. expected: float64, of the same shape. slack: a factor of
    the tolerance, for sums of many terms.
    """
    name = str(actual.dtype).removeprefix("torch.")
    expect(name == dtype, f"{what}: the result has the dtype {name}; expected {dtype}")
    expect(
        tuple(actual.shape) == tuple(expected.shape),
        f"{what}: the result has the shape {list(actual.shape)}; expected {list(expected.shape)}",
    )
    if not expected.numel():
        return
    wide = actual.detach().to("cpu").double()
    error = (wide - expected).abs() / expected.abs().clamp(min=1.0)
    error = error.nan_to_num(nan=float("inf")).flatten()
    worst = int(error.argmax())
    tolerance = slack * TOLERANCES[dtype]
    expect(
        float(error[worst]) <= tolerance,
        f"{what} in {dtype}: element {worst} is {float(wide.flatten()[worst])}; expected "
        f"{float(expected.flatten()[worst])} with a tolerance of {tolerance}",
    )


def random_tensor(
    shape: tuple[int, ...], *, dtype: str, device: torch.device, seed: int, scale: float = 1.0
) -> torch.Tensor:
    """Return normal random values, rounded to `dtype`. They depend only on shape and seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * scale
    return values.to(getattr(torch, dtype)).to(device)


def exact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in float64 on the host."""
    return tensor.detach().to("cpu").double()

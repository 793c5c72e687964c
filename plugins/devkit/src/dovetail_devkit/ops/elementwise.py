"""The conformance cases of `gelu_tanh_and_mul`, `scale` and `soft_cap`.

The references are in float64. torch is imported within functions.
"""

from __future__ import annotations

import math
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

SHAPES = ((1, 64), (3, 80), (17, 33), (2, 2048), (1, 33_000))
"""Rows and features of each case; rows of logits are long."""
FACTORS = (640**0.5, 1 + 1.49 / 1024)
"""The second factor is nearly the middle of two numbers in float16."""
CAPS = (30.0, 1.5)
ONE_ROUNDING = {"float32": 0.2, "float16": 0.2, "bfloat16": 0.4}
"""Factors for the tolerance of a result that is rounded only once; Triton's interpreter truncates
to bfloat16."""
APPROXIMATE = 2.0
"""Factor for the tolerance of tanh, whose exponentials may be approximate."""


def elementwise_cases(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str]
) -> Iterator[Case]:
    """Return the cases of these operations that the class overrides."""
    checks = {
        "gelu_tanh_and_mul": _check_gelu,
        "scale": _check_scale,
        "soft_cap": _check_soft_cap,
    }
    return operation_cases(checks, ops_cls, device, dtypes=dtypes)


def exact_gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the tanh approximation of GELU for x in float64."""
    return x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())


def _check_gelu(ops: Ops, device: torch.device, dtype: str) -> None:
    for seed, (rows, size) in enumerate(SHAPES):
        wide = random_tensor((rows, 2 * size + 3), dtype=dtype, device=device, seed=seed, scale=3.0)
        gate, x = wide[:, :size], wide[:, size : 2 * size]
        gate[0, :2], gate[0, -1] = 200.0, -200.0
        want, kept = exact(x) * exact_gelu_tanh(exact(gate)), gate.clone()
        what = f"gelu_tanh_and_mul {(rows, size)}"
        for layout in (x.clone(), x):
            got = ops.gelu_tanh_and_mul(layout, gate)
            expect(kept.equal(gate), f"{what} must not change its gate")
            expect_close(got, want, dtype=dtype, what=what)


def _check_scale(ops: Ops, device: torch.device, dtype: str) -> None:
    for (seed, (rows, size)), factor in product(enumerate(SHAPES), FACTORS):
        x = random_tensor((rows, size + 3), dtype=dtype, device=device, seed=seed)[:, :size]
        want, what = exact(x) * factor, f"scale {(rows, size)} by {factor}"
        for layout in (x.clone(), x):
            got = ops.scale(layout, factor)
            expect_close(got, want, dtype=dtype, what=what, slack=ONE_ROUNDING[dtype])


def _check_soft_cap(ops: Ops, device: torch.device, dtype: str) -> None:
    for (seed, (rows, size)), cap in product(enumerate(SHAPES), CAPS):
        wide = random_tensor((rows, size + 3), dtype=dtype, device=device, seed=seed, scale=cap)
        logits = wide[:, :size]
        logits[0, :2], logits[0, -1] = 1e4, -1e4
        want, what = cap * (exact(logits) / cap).tanh(), f"soft_cap {(rows, size)} with {cap}"
        for layout in (logits.clone(), logits):
            got = ops.soft_cap(layout, cap)
            expect_close(got, want, dtype=dtype, what=what, slack=APPROXIMATE)

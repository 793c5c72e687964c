"""The conformance cases of offset norms, gates, shared experts and per-head products.

The operations are `offset_rms_norm`, `add_offset_rms_norm`, `sigmoid_and_mul`,
`add_shared_expert`, `head_linear` and `latent_inputs`; the references are in float64. torch is
imported within functions.
Dimensions: T tokens, D hidden size, H heads, L latent features, N features of a key without
position, R rotary features, I input and O output features of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from dovetail.interfaces.ops import LatentWeights, Ops
from dovetail_devkit.case import Case
from dovetail_devkit.comparison import exact, expect_close, random_tensor
from dovetail_devkit.expectation import expect
from dovetail_devkit.ops.operation_cases import operation_cases
from dovetail_devkit.ops.rotary import far_apart, rotary_table, turned

if TYPE_CHECKING:
    import torch

EPS = 1e-3
SHAPES = ((1, 64), (3, 80), (17, 33), (5, 1024))
HEAD_SHAPES = ((1, 3, 16, 24), (5, 2, 33, 70), (6, 1, 128, 9), (3, 4, 7, 80))
"""Tokens, heads, input and output features of each case of `head_linear`."""
LATENT_SHAPES = ((1, 4, 12, 24, 8), (5, 3, 16, 40, 16), (7, 2, 33, 64, 64))
"""T, H, N, L and R of each case of `latent_inputs`."""
SLACK = 4.0
"""Factor for the tolerance of products of bfloat16 values that are rounded twice."""


def latent_and_gate_cases(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str]
) -> Iterator[Case]:
    """Return the cases of these operations that the class overrides."""
    checks = {
        "offset_rms_norm": _check_norm,
        "add_offset_rms_norm": _check_add_norm,
        "sigmoid_and_mul": _check_gate,
        "add_shared_expert": _check_shared,
        "head_linear": _check_heads,
        "latent_inputs": _check_latent,
    }
    return operation_cases(checks, ops_cls, device, dtypes=dtypes)


class _Maker:
    """Creates random tensors. Each one has a separate seed."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self._dtype, self._device, self._seed = dtype, device, 0

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        self._seed += 1
        return random_tensor(
            shape, dtype=self._dtype, device=self._device, seed=self._seed, scale=scale
        )


def exact_offset_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the result of `offset_rms_norm` for x in float64."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + exact(weight_D))


def _check_norm(ops: Ops, device: torch.device, dtype: str) -> None:
    make = _Maker(dtype, device)
    for shape in (*SHAPES, (2, 4, 32)):
        weight_D, wide = make(shape[-1]), make(*shape[:-1], 3 * shape[-1])
        for x in (make(*shape), wide[..., shape[-1] : 2 * shape[-1]]):
            before = x.clone()
            got = ops.offset_rms_norm(x, weight_D, EPS)
            what = f"offset_rms_norm {shape}"
            expect_close(got, exact_offset_norm(exact(x), weight_D, EPS), dtype=dtype, what=what)
            expect(before.equal(x), f"{what} must not change its input")


def _check_add_norm(ops: Ops, device: torch.device, dtype: str) -> None:
    make = _Maker(dtype, device)
    for shape in SHAPES:
        x, residual, weight_D = make(*shape), make(*shape), make(shape[-1])
        # The sum is rounded to the dtype first; the norm is computed from the rounded sum.
        total = exact((exact(x) + exact(residual)).to(x.dtype))
        normed, summed = ops.add_offset_rms_norm(x, residual.clone(), weight_D, EPS)
        what = f"add_offset_rms_norm {shape}"
        expect_close(summed, total, dtype=dtype, what=f"{what}, the sum")
        want = exact_offset_norm(total, weight_D, EPS)
        expect_close(normed, want, dtype=dtype, what=f"{what}, the norm")


def _check_gate(ops: Ops, device: torch.device, dtype: str) -> None:
    make = _Maker(dtype, device)
    for rows, size in SHAPES:
        wide = make(rows, 2 * size + 3)
        x, gate = wide[:, :size], wide[:, size : 2 * size]
        want = exact(x) * exact(gate).sigmoid()
        kept = gate.clone()
        got = ops.sigmoid_and_mul(x.clone(), gate)
        what = f"sigmoid_and_mul {(rows, size)}"
        expect_close(got, want, dtype=dtype, what=what)
        expect(kept.equal(gate), f"{what} must not change its gate")


def _check_shared(ops: Ops, device: torch.device, dtype: str) -> None:
    make = _Maker(dtype, device)
    for rows, size in SHAPES:
        y, shared, x = make(rows, size), make(rows, size), make(rows, size)
        gate_D = make(size, scale=size**-0.5)
        for gate in (None, gate_D):
            want = exact(y) + exact(shared)
            if gate is not None:
                factor_T1 = (exact(x) @ exact(gate)).sigmoid()[:, None]
                want = exact(y) + factor_T1 * exact(shared)
            kept = shared.clone(), x.clone()
            got = ops.add_shared_expert(y.clone(), shared, x, gate)
            what = f"add_shared_expert {(rows, size)}, gate={gate is not None}"
            expect_close(got, want, dtype=dtype, what=what)
            same = kept[0].equal(shared) and kept[1].equal(x)
            expect(same, f"{what} must only change y")


def _check_heads(ops: Ops, device: torch.device, dtype: str) -> None:
    import torch

    make = _Maker(dtype, device)
    for tokens, heads, inputs, outputs in HEAD_SHAPES:
        x_THI = make(tokens, heads, inputs + 5)[..., :inputs]
        layouts = {
            "rows of outputs": make(heads, outputs, inputs, scale=inputs**-0.5),
            "rows of inputs": make(heads, inputs, outputs, scale=inputs**-0.5).mT,
        }
        for layout, weight_HOI in layouts.items():
            want = torch.einsum("thi,hoi->tho", exact(x_THI), exact(weight_HOI))
            got = ops.head_linear(x_THI, weight_HOI)
            what = f"head_linear {(tokens, heads, inputs, outputs)}, {layout}"
            expect_close(got, want, dtype=dtype, what=what)
            expect(got.is_contiguous(), f"{what}: the result must be contiguous")


def _check_latent(ops: Ops, device: torch.device, dtype: str) -> None:
    import torch

    make = _Maker(dtype, device)
    for tokens, heads, plain, rank, rotary in LATENT_SHAPES:
        q_THF = make(tokens, heads, plain + rotary)
        latent_TF = make(tokens, rank + rotary + 3)[:, : rank + rotary]
        key_HNL = make(heads, plain, rank, scale=plain**-0.5)
        weights = LatentWeights(norm_L=make(rank), eps=EPS, key_HNL=key_HNL)
        table_PR = rotary_table(rotary, device)
        positions_T = torch.tensor(far_apart(0, tokens), device=device)
        queries, keys = ops.latent_inputs(q_THF, latent_TF, weights, positions_T, table_PR)
        cos_sin_TR = exact(table_PR[positions_T])
        q, latent = exact(q_THF), exact(latent_TF)
        normal = latent[:, :rank]
        normal = normal / (normal.square().mean(-1, keepdim=True) + EPS).sqrt()
        absorbed = torch.einsum("thn,hnl->thl", q[..., :plain], exact(key_HNL))
        wants = {
            "queries": (queries, absorbed, turned(q[..., plain:], cos_sin_TR)),
            "keys": (
                keys,
                (normal * exact(weights.norm_L))[:, None],
                turned(latent[:, None, rank:], cos_sin_TR),
            ),
        }
        for name, (got, first, last) in wants.items():
            what = f"latent_inputs {(tokens, heads, plain, rank, rotary)}, {name}"
            want = torch.cat((first, last), dim=-1)
            expect_close(got, want, dtype=dtype, what=what, slack=SLACK)

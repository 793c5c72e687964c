"""The conformance suite of the op provider contract, for any provider on any device.

This module compares every operation that the class overrides with a float64 reference, for typical
shapes: one token, many tokens, sizes that are not powers of two, leading dimensions, views into a
fused projection. The cases of sampling, step inputs, experts and states are in
`dovetail_devkit.ops`. torch is imported within functions.

Dimensions: T tokens, D features, H query heads, K key-value heads, S head size, P positions, F half
of rotary_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dovetail.interfaces.ops import Ops, overridden_operations
from dovetail_devkit.case import Case, run_all
from dovetail_devkit.comparison import TOLERANCES, exact, expect_close, random_tensor
from dovetail_devkit.expectation import checking, expect
from dovetail_devkit.ops.draw import NUM_DRAWS, draw_cases
from dovetail_devkit.ops.elementwise import elementwise_cases
from dovetail_devkit.ops.experts import expert_cases
from dovetail_devkit.ops.inputs import input_cases
from dovetail_devkit.ops.latent_and_gates import latent_and_gate_cases
from dovetail_devkit.ops.layer_norm import layer_norm_cases
from dovetail_devkit.ops.recurrence import recurrence_cases
from dovetail_devkit.ops.rotary import far_apart, rotary_table, turned
from dovetail_devkit.ops.states import state_cases

if TYPE_CHECKING:
    import torch

EPS = 1e-6
_SHAPES = ((1, 64), (3, 80), (17, 33), (5, 4096), (2, 4, 32))
_HEADS = ((1, 4, 4, 64, 64), (7, 8, 2, 128, 128), (3, 6, 1, 80, 80), (5, 4, 2, 64, 32))
"""For each rotary case: tokens, query heads, key-value heads, head size, rotary_dim."""


@checking("ops")
def check_ops(
    ops_cls: type[Ops], device: torch.device, *, dtypes: Iterable[str] = tuple(TOLERANCES)
) -> None:
    """Check a provider of ops on `device`. Raise AssertionError with the first difference.

    dtypes: names of the dtypes to check, if the provider declares them.
    """
    run_all(ops_cases(ops_cls, device, dtypes=dtypes))


def ops_cases(
    ops_cls: type[Ops],
    device: torch.device,
    *,
    dtypes: Iterable[str] = tuple(TOLERANCES),
    num_draws: int = NUM_DRAWS,
) -> Iterator[Case]:
    """Yield the cases of the operations that the class overrides.

    num_draws: number of samples of each frequency test. The other arguments are the same as for
    `check_ops`.
    """

    def check_shapes(check: _Check, shapes: tuple[Any, ...], dtype: str) -> None:
        types = ops_cls.device_types
        on_device = not types or device.type in types
        expect(
            on_device, f"the provider supports the devices {sorted(types)}, but not {device.type}"
        )
        ops = ops_cls()
        for seed, shape in enumerate(shapes):
            check(ops, shape, _Maker(dtype, device, seed))

    dtypes = tuple(name for name in dtypes if name in (ops_cls.dtypes or {name}))
    overridden = overridden_operations(ops_cls)
    for dtype in dtypes:
        for name, (operation, check, shapes) in _CHECKS.items():
            if operation not in overridden:
                continue
            yield Case(name=f"{name} in {dtype}", run=partial(check_shapes, check, shapes, dtype))
    yield from draw_cases(ops_cls, device, dtypes=dtypes, num_draws=num_draws)
    yield from input_cases(ops_cls, device)
    yield from expert_cases(ops_cls, device, dtypes=dtypes)
    yield from layer_norm_cases(ops_cls, device, dtypes=dtypes)
    yield from latent_and_gate_cases(ops_cls, device, dtypes=dtypes)
    yield from elementwise_cases(ops_cls, device, dtypes=dtypes)
    yield from state_cases(ops_cls, device, dtypes=dtypes)
    yield from recurrence_cases(ops_cls, device, dtypes=dtypes)


class _Maker:
    """Creates the tensors of one case."""

    def __init__(self, dtype: str, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self.device = device
        self._seed = 100 * seed

    def __call__(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        self._seed += 1
        return random_tensor(
            shape, dtype=self.dtype, device=self.device, seed=self._seed, scale=scale
        )


def _unchanged(call: Callable[[], Any], what: str, *tensors: torch.Tensor) -> Any:
    """Return the result of `call`. Raise AssertionError if it changes one of `tensors`."""
    import torch

    copies = [tensor.clone() for tensor in tensors]
    result = call()
    for tensor, copy in zip(tensors, copies, strict=True):
        expect(torch.equal(tensor, copy), f"{what} must not change its inputs")
    return result


def _norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight_D


def _check_norm(ops: Ops, shape: tuple[int, ...], make: _Maker) -> None:
    what = f"rms_norm {shape}"
    x, weight_D = make(*shape), make(shape[-1])
    expected = _norm(exact(x), exact(weight_D), EPS)
    actual = _unchanged(lambda: ops.rms_norm(x, weight_D, EPS), what, x, weight_D)
    expect_close(actual, expected, dtype=make.dtype, what=what)
    wide = make(*shape[:-1], 3 * shape[-1])
    view = wide[..., shape[-1] : 2 * shape[-1]]
    actual = _unchanged(lambda: ops.rms_norm(view, weight_D, EPS), what, wide)
    expected = _norm(exact(view), exact(weight_D), EPS)
    expect_close(actual, expected, dtype=make.dtype, what=f"{what}, a view")


def _check_add_norm(ops: Ops, shape: tuple[int, ...], make: _Maker) -> None:
    what = f"add_rms_norm {shape}"
    x, residual, weight_D = make(*shape), make(*shape), make(shape[-1])
    # The sum is rounded to the dtype first; the norm is computed from the rounded sum.
    total = exact((exact(x) + exact(residual)).to(x.dtype))
    normed, summed = _unchanged(
        lambda: ops.add_rms_norm(x, residual, weight_D, EPS), what, x, weight_D
    )
    expect_close(summed, total, dtype=make.dtype, what=f"{what}, the sum")
    expected = _norm(total, exact(weight_D), EPS)
    expect_close(normed, expected, dtype=make.dtype, what=f"{what}, the norm")


def _check_silu(ops: Ops, shape: tuple[int, ...], make: _Maker) -> None:
    what = f"silu_and_mul {shape}"
    x = make(*shape[:-1], 2 * shape[-1], scale=3.0)
    gate, up = exact(x).chunk(2, dim=-1)
    actual = _unchanged(lambda: ops.silu_and_mul(x), what, x)
    expect_close(actual, gate * gate.sigmoid() * up, dtype=make.dtype, what=what)


def _check_rotary(ops: Ops, heads: tuple[int, ...], make: _Maker) -> None:
    import torch

    num_tokens, num_heads, num_kv_heads, head_size, rotary_dim = heads
    what = f"rotary_embedding {heads}"
    cos_sin_PS = rotary_table(rotary_dim, make.device)
    positions_T = torch.tensor(far_apart(0, num_tokens)).to(make.device)
    fused = make(num_tokens, num_heads + 2 * num_kv_heads, head_size)
    q_THS, k_TKS, _ = fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    layouts = {"a view": (q_THS, k_TKS), "apart": (q_THS.contiguous(), k_TKS.contiguous())}
    for layout, (q, k) in layouts.items():
        call = partial(ops.rotary_embedding, q, k, positions_T, cos_sin_PS)
        actual = _unchanged(call, what, q, k, fused, positions_T, cos_sin_PS)
        for name, result, plain in zip("qk", actual, (q_THS, k_TKS), strict=True):
            expected = turned(exact(plain), exact(cos_sin_PS)[positions_T.to("cpu")])
            expect_close(result, expected, dtype=make.dtype, what=f"{what}, {name}, {layout}")


def _check_large_values(ops: Ops, shape: tuple[int, ...], make: _Maker) -> None:
    """Check that squares are summed in float32, without overflow and without lost terms."""
    x_TD, weight_D = make(*shape, scale=300.0), make(shape[-1])
    actual = ops.rms_norm(x_TD, weight_D, EPS)
    expected = _norm(exact(x_TD), exact(weight_D), EPS)
    expect_close(actual, expected, dtype=make.dtype, what=f"rms_norm {shape}")


def _check_embedding(ops: Ops, shape: tuple[int, int], make: _Maker) -> None:
    import torch

    num_rows, size = shape
    table_VD = make(num_rows, 2 * size)[:, :size]
    ids_T = torch.tensor([(5 * t + 3) % num_rows for t in range(7)], device=make.device)
    actual = _unchanged(lambda: ops.embedding(ids_T, table_VD), "embedding", ids_T, table_VD)
    expect(
        torch.equal(actual, table_VD[ids_T]),
        f"embedding returns wrong rows of a table of the shape {shape}",
    )
    expect(actual.is_contiguous(), "embedding must return a new, contiguous tensor")


def _check_best_tokens(ops: Ops, shape: tuple[int, int], make: _Maker) -> None:
    import torch

    logits_RV = make(*shape)
    best = 2 * shape[1] // 3
    logits_RV[0, best:] = float(logits_RV.max()) + 1  # the first of equal values is the best
    if len(logits_RV) > 1:
        logits_RV[-1] = -torch.inf
    expected = [int(torch.nonzero(row == row.max())[0]) for row in logits_RV.double()]
    actual = ops.best_tokens(logits_RV)
    expect(actual.dtype == torch.int64, f"best_tokens returns {actual.dtype}; expected int64")
    expect(
        actual.tolist() == expected,
        f"best_tokens returns {actual.tolist()} for logits of the shape {shape}; expected "
        f"{expected}",
    )
    logits_RV[0, best + 1] = torch.nan
    expect(
        int(ops.best_tokens(logits_RV)[0]) == best + 1,
        "best_tokens must return the column of a NaN if a row has one",
    )


def _check_mask_tokens(ops: Ops, shape: tuple[int, int], make: _Maker) -> None:
    import torch

    logits_SV = make(*shape)
    num_rows, size = shape
    rows_G = torch.arange(num_rows - 1, -1, -2, device=logits_SV.device)
    generator = torch.Generator().manual_seed(size)
    allowed_GV = torch.rand(len(rows_G), 32 * ((size + 31) // 32), generator=generator) < 0.5
    allowed_GV[0, : size // 2] = True
    allowed_GV[-1, size // 3 :] = False
    weights_8 = 1 << torch.arange(8)
    bits_GB = (allowed_GV.view(len(rows_G), -1, 8) * weights_8).sum(-1).to(torch.uint8)
    want_SV = logits_SV.clone()
    for i, row in enumerate(rows_G.tolist()):
        want_SV[row, ~allowed_GV[i, :size].to(logits_SV.device)] = -torch.inf
    ops.mask_tokens(logits_SV, rows_G, bits_GB.to(logits_SV.device))
    expect(
        torch.equal(logits_SV, want_SV),
        f"mask_tokens must set the logits of forbidden tokens to -inf, and change no others; "
        f"the shape is {shape}",
    )


_Check = Callable[[Ops, Any, _Maker], None]

_CHECKS: Mapping[str, tuple[str, _Check, tuple[Any, ...]]] = {
    "rms_norm": ("rms_norm", _check_norm, _SHAPES),
    "rms_norm, large": ("rms_norm", _check_large_values, ((2, 2048),)),
    "add_rms_norm": ("add_rms_norm", _check_add_norm, _SHAPES),
    "silu_and_mul": ("silu_and_mul", _check_silu, _SHAPES),
    "rotary_embedding": ("rotary_embedding", _check_rotary, _HEADS),
    "embedding": ("embedding", _check_embedding, ((97, 64), (8, 33))),
    "mask_tokens": ("mask_tokens", _check_mask_tokens, ((1, 97), (3, 5000), (17, 128))),
    "best_tokens": ("best_tokens", _check_best_tokens, ((1, 97), (3, 5000), (17, 128))),
}
"""Map of case name to the operation, its check and the shapes."""

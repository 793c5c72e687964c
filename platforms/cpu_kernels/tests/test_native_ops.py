"""The small operations at every level of this CPU, compared with float64.

The tolerance is 5e-3 · max(1, |value|): bf16 rounding is at most 2^-9, and the sum is also rounded.
"""

from __future__ import annotations

import ctypes
import random

import pytest
import torch
from torch.nn import functional

import dovetail_cpu_kernels as native
from dovetail_cpu_kernels.ops import OPS, op

pytestmark = [
    pytest.mark.skipif(not native.status().available, reason=native.status().reason),
    pytest.mark.usefixtures("level"),
]

TOLERANCE = 5e-3
SIZES = (1, 15, 16, 17, 31, 32, 64, 100, 1024, 3072)


@pytest.fixture(params=[1, 3])
def num_threads(request):
    native.set_num_threads(request.param)


def call(name, **values):
    """Fill the struct of an operation and call it. Tensors are passed by address."""
    plain = {k: v.data_ptr() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    args = OPS[name](**plain)  # keeps the tensors alive during the call
    op(name)(ctypes.addressof(args))


def numbers(*shape, seed=0, padding=0, scale=1.0):
    """Return random bf16 rows with `padding` unused numbers after each row."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + padding, generator=generator) * scale
    return wide.bfloat16()[..., : shape[-1]]


def check(actual, expected):
    error = (actual.double() - expected).abs() / expected.abs().clamp_min(1)
    assert float(error.nan_to_num(nan=float("inf")).max()) <= TOLERANCE


def norm(x, weight, eps, offset):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight.double() + offset)


@pytest.mark.costly
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_of_rows_equals_the_reference(num_threads, size):
    x, weight = numbers(50, size, padding=3), numbers(size, seed=1)
    y = torch.zeros(50, size).bfloat16()
    for offset in (0.0, 1.0):
        strides = {"x_outer_stride": x.stride(0), "y_outer_stride": size}
        call(
            "rms_norm", x=x, y=y, weight=weight, num_outer=50, num_inner=1, size=size, eps=1e-5,
            weight_offset=offset, **strides,
        )  # fmt: skip
        check(y, norm(x, weight, 1e-5, offset))


def test_rms_norm_works_in_place_on_heads_of_a_fused_projection(num_threads):
    qkv, weight = numbers(300, 24, 64), numbers(64, seed=1)
    before, heads = qkv.clone(), qkv[:, 16:20]
    strides = {"x_outer_stride": heads.stride(0), "x_inner_stride": heads.stride(1)}
    strides |= {"y_outer_stride": heads.stride(0), "y_inner_stride": heads.stride(1)}
    call(
        "rms_norm", x=heads, y=heads, weight=weight, num_outer=300, num_inner=4, size=64, eps=1e-6,
        **strides,
    )  # fmt: skip
    check(heads, norm(before[:, 16:20], weight, 1e-6, 0.0))
    assert torch.equal(qkv[:, :16], before[:, :16])
    assert torch.equal(qkv[:, 20:], before[:, 20:])


@pytest.mark.costly
@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_equals_the_reference(num_threads, size):
    x, residual = numbers(40, size, padding=2), numbers(40, size, seed=2, padding=1)
    weight, y = numbers(size, seed=1), torch.zeros(40, size).bfloat16()
    want = x + residual
    strides = {"x_stride": x.stride(0), "residual_stride": residual.stride(0), "y_stride": size}
    call(
        "add_rms_norm", x=x, residual=residual, y=y, weight=weight, num_rows=40, size=size,
        eps=1e-5, **strides,
    )  # fmt: skip
    assert torch.equal(residual, want)
    check(y, norm(want, weight, 1e-5, 0.0))


def rotated(x, positions, table):
    half = table.shape[1] // 2
    cos, sin = table[positions].double()[:, None].split(half, dim=-1)
    first, second, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@pytest.mark.costly
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm_equals_the_reference(num_threads, size):
    rows = 70
    x, residual = numbers(rows, size, padding=3), numbers(rows, size, seed=1, padding=5)
    weight, bias = numbers(size, seed=2), numbers(size, seed=3)
    for adds, scales, shifts in ((False, True, True), (True, True, False), (True, False, True)):
        total = residual.clone().contiguous()
        y = torch.full((rows, size), 7.0).bfloat16()
        call(
            "layer_norm",
            x=x,
            residual=total if adds else None,
            y=y,
            num_rows=rows,
            x_stride=x.stride(0),
            residual_stride=total.stride(0),
            y_stride=size,
            weight=weight if scales else None,
            bias=bias if shifts else None,
            size=size,
            eps=1e-5,
        )
        want_sum = (x.float() + residual.float()).bfloat16() if adds else residual
        assert torch.equal(total, want_sum)
        want = functional.layer_norm(
            (total if adds else x).double(),
            (size,),
            weight.double() if scales else None,
            bias.double() if shifts else None,
            1e-5,
        )
        check(y, want)


@pytest.mark.costly
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (128, 128), (80, 32), (96, 24), (6, 2)])
@pytest.mark.parametrize("in_place", [False, True])
def test_rotary_embedding_equals_the_reference(num_threads, size, rotary, in_place):
    qkv = numbers(200, 12, size, padding=1)
    q, k = qkv[:, :6], qkv[:, 6:8]
    positions = torch.randint(0, 500, (200,), generator=torch.Generator().manual_seed(3))
    angles = torch.rand(500, rotary // 2, generator=torch.Generator().manual_seed(4)) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    want_q, want_k = rotated(q, positions, table), rotated(k, positions, table)
    q_out = q if in_place else torch.zeros(200, 6, size).bfloat16()
    k_out = k if in_place else torch.zeros(200, 2, size).bfloat16()
    tensors = {"q": q, "k": k, "q_out": q_out, "k_out": k_out}
    strides = {f"{n}_token_stride": x.stride(0) for n, x in tensors.items()}
    strides |= {f"{n}_head_stride": x.stride(1) for n, x in tensors.items()}
    call(
        "rotary", positions=positions, cos_sin=table, num_tokens=200, num_heads=6, num_kv_heads=2,
        head_size=size, rotary_dim=rotary, **tensors, **strides,
    )  # fmt: skip
    check(q_out, want_q)
    check(k_out, want_k)


GATES = {
    "silu_mul": functional.silu,
    "gelu_tanh_mul": lambda x: functional.gelu(x, approximate="tanh"),
    "sigmoid_mul": torch.sigmoid,
}


def call_gate(name, gate, up, y):
    """Call a gated activation. gate and up are halves of the same rows."""
    fields = {"num_rows": len(y), "size": y.shape[1], "y_stride": y.stride(0), "y": y}
    if name == "silu_mul":
        call(name, x=gate, x_stride=gate.stride(0), **fields)
    else:
        strides = {"x_stride": up.stride(0), "gate_stride": gate.stride(0)}
        call(name, x=up, gate=gate, **strides, **fields)


@pytest.mark.costly
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("size", SIZES)
def test_gated_activations_equal_the_reference(num_threads, name, size):
    x, y = numbers(60, 2 * size, padding=5, scale=4.0), torch.zeros(60, size).bfloat16()
    gate, up = x.split(size, dim=1)
    call_gate(name, gate, up, y)
    check(y, GATES[name](gate.double()) * up.double())


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_of_extreme_values_are_correct(name):
    gate = torch.tensor([-1e30, -100.0, -20.0, 20.0, 100.0, 1e30, 0.0, torch.nan]).bfloat16()
    x, y = torch.cat((gate, torch.ones(8).bfloat16()))[None], torch.zeros(1, 8).bfloat16()
    call_gate(name, x[:, :8], x[:, 8:], y)
    y = y[0]
    want = torch.tensor([0.0, 0.0, 0.0, 20.0, 100.0, 1e30, 0.0]).bfloat16()
    torch.testing.assert_close(y[:7], want, rtol=4e-3, atol=1e-4)
    assert y[7].isnan()


def changed_by(name, x, factor):
    """Return a copy of the rows, changed by `scale` or `soft_cap`; numbers after a row stay."""
    size = x.shape[1] - 3
    y = x.clone()
    call(
        name, x=y, num_rows=len(y), size=size, stride=y.stride(0), factor=factor,
        is_float32=int(y.dtype == torch.float32),
    )  # fmt: skip
    assert torch.equal(y[:, size:], x[:, size:])
    return y[:, :size]


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [*SIZES, 70_001])
def test_scales_and_soft_caps_equal_the_reference(num_threads, dtype, size):
    x = numbers(5, size + 3, scale=20.0).to(dtype)
    assert torch.equal(changed_by("scale", x, 25.298221), x[:, :size] * 25.298221)
    for cap in (30.0, 1.5):
        check(changed_by("soft_cap", x, cap), cap * (x[:, :size].double() / cap).tanh())


def test_soft_caps_in_float32_are_accurate():
    """The error of tanh is half of the relative error of its exponential, and rounding."""
    x = torch.linspace(-3.0, 3.0, 10_003)[None]
    actual = changed_by("soft_cap", x, 1.0)
    assert (actual - x[:, :10_000].double().tanh()).abs().max() < 4e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_soft_caps_of_extreme_values_are_correct(dtype):
    values = torch.tensor([-torch.inf, -1e30, 0.0, 1e30, torch.inf, torch.nan, 0, 0, 0])
    actual = changed_by("soft_cap", values[None].to(dtype), 30.0)[0]
    assert actual[:5].tolist() == [-30.0, -30.0, 0.0, 30.0, 30.0]
    assert actual[5].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_soft_cap_does_not_depend_on_the_place_of_a_number(dtype):
    """Pieces and vectors of a row begin at other places."""
    x = numbers(1, 70_003, scale=20.0).to(dtype)
    whole = changed_by("soft_cap", x, 30.0)
    native.set_num_threads(3)
    assert torch.equal(changed_by("soft_cap", x[:, 7:].contiguous(), 30.0), whole[:, 7:])


def test_embedding_returns_the_rows_of_the_table(num_threads):
    table = numbers(1000, 72, padding=4)
    ids = torch.tensor([random.Random(0).randrange(1000) for _ in range(900)])
    y = torch.zeros(900, 80).bfloat16()
    call(
        "embedding", ids=ids, y=y, num_tokens=900, y_stride=80, table=table,
        table_stride=table.stride(0), size=72,
    )  # fmt: skip
    assert torch.equal(y[:, :72], table[ids])
    assert not y[:, 72:].any()


@pytest.mark.costly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 16, 1000, 1024, 5003])
def test_argmax_returns_the_first_maximum_or_nan(num_threads, dtype, size):
    logits = torch.randn(9, size + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = logits[:, :size]
    logits[1] = -torch.inf
    logits[2, size // 2 :] = 9.0
    logits[3, size // 3] = torch.nan
    logits[4, -1] = torch.inf
    logits[5, : size // 2] = -torch.inf
    ids, sums = torch.zeros(9, dtype=torch.int64), torch.zeros(9)
    call(
        "argmax", logits=logits, ids=ids, logsumexp=sums, num_rows=9, stride=size + 3, size=size,
        is_float32=int(dtype == torch.float32),
    )  # fmt: skip
    assert torch.equal(ids, logits.argmax(-1))
    want = logits.double().logsumexp(-1).float()
    torch.testing.assert_close(sums, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_the_results_of_a_row_do_not_depend_on_other_rows():
    x, weight = numbers(64, 1000), numbers(1000, seed=1)
    y, alone = torch.zeros(64, 1000).bfloat16(), torch.zeros(1, 1000).bfloat16()
    fixed = {"weight": weight, "num_inner": 1, "size": 1000, "eps": 1e-5}
    native.set_num_threads(3)
    call("rms_norm", x=x, y=y, num_outer=64, x_outer_stride=1000, y_outer_stride=1000, **fixed)
    native.set_num_threads(1)
    call("rms_norm", x=x[33], y=alone, num_outer=1, **fixed)
    assert torch.equal(alone[0], y[33])


def test_an_unknown_operation_is_rejected():
    with pytest.raises(
        ValueError, match="operation 'group_norm' does not exist; the operations are rms_norm"
    ):
        op("group_norm")

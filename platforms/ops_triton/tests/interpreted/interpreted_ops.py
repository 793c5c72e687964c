"""Triton's ops in the interpreter: cases that the conformance suite does not include."""

import pytest
import torch

from dovetail.errors import ContractError
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_ops_triton.ops import TritonOps


@pytest.fixture
def ops():
    return TritonOps()


def normal(*shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference_norm(x, weight):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize(
    "x",
    [
        normal(2, 3, 2, 16),
        normal(16),
        normal(3, 16).T,
        normal(3, 8, 64)[:, 2:5, 16:32],
    ],
    ids=["four dimensions", "one dimension", "strided features", "heads of a product"],
)
def test_rows_may_have_any_strides(ops, x):
    weight = normal(x.shape[-1], seed=2)
    actual = ops.rms_norm(x, weight, 1e-6)
    assert actual.is_contiguous() and actual.shape == x.shape
    assert torch.allclose(actual.double(), reference_norm(x, weight), atol=1e-5)
    wide = torch.cat((x, x), dim=-1)
    gate = ops.silu_and_mul(wide)
    assert gate.is_contiguous()
    assert torch.allclose(gate, torch.nn.functional.silu(x) * x, atol=1e-5)


def test_the_residual_is_summed_in_place(ops):
    x, wide, weight = normal(5, 24), normal(5, 48, seed=3), normal(24, seed=4)
    residual, expected = wide[:, :24], wide[:, :24] + x
    normed, summed = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert summed.data_ptr() == residual.data_ptr() and torch.equal(residual, expected)
    assert torch.allclose(normed.double(), reference_norm(expected, weight), atol=1e-5)


def test_all_heads_are_rotated_if_one_program_rotates_only_a_part_of_them(ops):
    q, k = normal(2, 20, 128), normal(2, 11, 128, seed=2)
    positions, cos_sin = torch.tensor([3, 1]), normal(5, 96, seed=3)
    actual = ops.rotary_embedding(q, k, positions, cos_sin)
    expected = FakeOps().rotary_embedding(q, k, positions, cos_sin)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(actual, expected, strict=True))


def test_empty_inputs_give_empty_outputs(ops):
    nothing, weight = torch.empty(0, 16), torch.ones(16)
    assert ops.rms_norm(nothing, weight, 1e-6).shape == (0, 16)
    assert ops.add_rms_norm(nothing, nothing.clone(), weight, 1e-6)[0].shape == (0, 16)
    assert ops.silu_and_mul(nothing).shape == (0, 8)
    ids = torch.empty(0, dtype=torch.int64)
    assert ops.embedding(ids, torch.ones(3, 16)).shape == (0, 16)
    assert ops.best_tokens(nothing).shape == (0,)
    q, k = ops.rotary_embedding(
        torch.empty(0, 4, 16), torch.empty(0, 2, 16), ids, torch.ones(9, 16)
    )
    assert (q.shape, k.shape) == ((0, 4, 16), (0, 2, 16))


def test_an_unsupported_dtype_is_rejected_with_advice(ops):
    wide = torch.ones(2, 16, dtype=torch.float64)
    weight = torch.ones(16, dtype=torch.float64)
    calls = [
        lambda: ops.rms_norm(wide, weight, 1e-6),
        lambda: ops.silu_and_mul(wide),
        lambda: ops.best_tokens(wide),
    ]
    for call in calls:
        with pytest.raises(ContractError, match=r"torch\.float64.*torch\.bfloat16.*'torch'"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_bits_of_a_row_do_not_depend_on_other_rows(ops, dtype):
    x, residual = normal(9, 96, dtype=dtype), normal(9, 96, dtype=dtype, seed=5)
    weight = normal(96, dtype=dtype, seed=6)
    alone = slice(4, 5)
    assert torch.equal(ops.rms_norm(x, weight, 1e-6)[alone], ops.rms_norm(x[alone], weight, 1e-6))
    assert torch.equal(ops.silu_and_mul(x)[alone], ops.silu_and_mul(x[alone]))
    together = ops.add_rms_norm(x, residual.clone(), weight, 1e-6)[0]
    by_itself = ops.add_rms_norm(x[alone], residual[alone].clone(), weight, 1e-6)[0]
    assert torch.equal(together[alone], by_itself)

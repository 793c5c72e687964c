"""Runs the suite of op providers on FlashInfer's Python code, with kernels in torch.

test_flashinfer_attention.py starts these tests in a separate process.
"""

from __future__ import annotations

import re
from typing import ClassVar

import pytest
import reference_ops
import torch
from cpu_backends import OnCpu
from patched_engine import generate_on_fake_device, on_fake_device
from reference_kernels import SOURCES
from reference_ops import ROTATE, op_calls

from dovetail.errors import ContractError
from dovetail.interfaces.ops import overridden_operations
from dovetail_attn_flashinfer.ops import FlashInferOps, can_rotate
from dovetail_devkit.fakes.ops import FakeOps
from dovetail_devkit.suites.ops import ops_cases
from dovetail_devkit.tiny_model import write_tiny_llama
from dovetail_torch.fake_device import NAME

reference_ops.install()


class OpsOnCpu(FlashInferOps):
    """The ops with reference kernels, on the CPU or the fake device."""

    device_types: ClassVar[frozenset[str]] = frozenset({"cpu", NAME})

    @classmethod
    def check_device(cls):
        """Accept this machine, which needs no compiler for reference kernels."""


CASES = list(ops_cases(OpsOnCpu, torch.device("cpu")))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_the_ops_pass_the_contract_suite(case):
    case.run()


def test_the_suite_covers_each_operation_in_both_dtypes():
    names = {case.name for case in CASES}
    for operation in overridden_operations(OpsOnCpu):
        for dtype in ("bfloat16", "float16"):
            assert any(operation in name and dtype in name for name in names), (operation, dtype)
    assert not any("float32" in name for name in names)


@pytest.fixture
def ops():
    op_calls.clear()
    return OpsOnCpu()


def normal(*shape, dtype=torch.bfloat16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(actual, expected):
    return torch.allclose(actual.double(), expected.double(), atol=0.02, rtol=0.01)


def unaligned(*shape):
    """Return a tensor that starts in the middle of a vector."""
    size = torch.Size(shape).numel()
    return normal(size + 3)[3:].view(shape)


@pytest.mark.parametrize(
    "x",
    [normal(6, 48)[:, 1:33], normal(3, 16).T, normal(3, 8, 64)[:, 2:5, 16:32], unaligned(5, 32)],
    ids=["unaligned rows", "strided features", "heads of a product", "unaligned memory"],
)
def test_inputs_that_the_kernels_would_misread_are_copied(ops, x):
    weight = normal(x.shape[-1], seed=2)
    expected = FakeOps().rms_norm(x, weight, 1e-6)
    actual = ops.rms_norm(x, weight, 1e-6)
    assert actual.is_contiguous() and close(actual, expected)
    residual = x.clone()
    normed, total = ops.add_rms_norm(x, x, weight, 1e-6)
    assert close(total, 2 * residual)
    assert close(normed, FakeOps().rms_norm(2 * residual, weight, 1e-6))
    wide = torch.cat((residual, residual), dim=-1)
    assert close(ops.silu_and_mul(wide), FakeOps().silu_and_mul(wide))
    assert close(ops.silu_and_mul(unaligned(3, 32)), FakeOps().silu_and_mul(unaligned(3, 32)))


def test_an_aligned_residual_is_summed_in_place(ops):
    x, wide, weight = normal(5, 32), normal(5, 64, seed=3), normal(32, seed=4)
    residual, expected = wide[:, :32], wide[:, :32] + x
    _, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert total.data_ptr() == residual.data_ptr() and torch.equal(residual, expected)


@pytest.mark.parametrize(
    ("head_size", "rotary_dim", "uses_kernel"),
    [
        (64, 64, True),
        (64, 32, True),
        (64, 24, False),
        (128, 96, True),
        (256, 64, True),
        (512, 64, True),
        (512, 48, False),
        (96, 96, True),
        (96, 64, False),
        (80, 80, False),
    ],
)
def test_heads_are_rotated_by_the_kernel_or_by_torch(ops, head_size, rotary_dim, uses_kernel):
    q, k = normal(5, 4, head_size), unaligned(5, 2, head_size)
    positions, table = torch.tensor([3, 1, 0, 9, 4]), normal(10, rotary_dim, dtype=torch.float32)
    actual = ops.rotary_embedding(q, k, positions, table)
    expected = FakeOps().rotary_embedding(q, k, positions, table)
    assert all(close(a, b) for a, b in zip(actual, expected, strict=True))
    assert op_calls == ([ROTATE] if uses_kernel else [])
    assert can_rotate(head_size, rotary_dim) == uses_kernel


def test_empty_inputs_launch_no_kernel(ops):
    nothing, weight = normal(0, 16), normal(16)
    assert ops.rms_norm(nothing, weight, 1e-6).shape == (0, 16)
    assert ops.add_rms_norm(nothing, nothing.clone(), weight, 1e-6)[0].shape == (0, 16)
    assert ops.silu_and_mul(nothing).shape == (0, 8)
    ids, table = torch.empty(0, dtype=torch.int64), torch.ones(9, 64)
    q, k = ops.rotary_embedding(normal(0, 4, 64), normal(0, 2, 64), ids, table)
    assert (q.shape, k.shape) == ((0, 4, 64), (0, 2, 64))
    assert op_calls == []


def test_dtypes_that_the_kernels_do_not_support_are_rejected(ops):
    wide, weight = normal(2, 16, dtype=torch.float32), normal(16)
    for call in (
        lambda: ops.rms_norm(wide, weight, 1e-6),
        lambda: ops.silu_and_mul(wide),
        lambda: ops.add_rms_norm(wide, wide, weight, 1e-6),
    ):
        with pytest.raises(
            ContractError, match=r"torch\.float32; it supports bfloat16 and float16"
        ):
            call()
    with pytest.raises(ContractError, match="needs tensors of one dtype"):
        ops.rms_norm(normal(2, 16), weight.half(), 1e-6)


def test_sampling_with_flashinfer_depends_on_the_position_in_the_batch():
    """If this fails, `draw_tokens` may be possible: read the new kernels."""
    text = (SOURCES.parent / "include/flashinfer/sampling.cuh").read_text("utf-8")
    assert len(re.findall(r"curand_init\(philox_seed, bx, philox_offset", text)) >= 5
    assert not overridden_operations(FlashInferOps) & {"draw_tokens", "best_tokens", "mask_tokens"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("model"), head_dim=64)


def test_an_engine_with_graphs_generates_the_same_tokens_as_with_eager_steps(model):
    tokens = {}
    for mode in ("none", "full_and_piecewise"):
        op_calls.clear()
        options = {"ops": OpsOnCpu, "graph_mode": mode}
        tokens[mode], counts = generate_on_fake_device(model, on_fake_device(OnCpu), **options)
        assert (counts.replayed > 10) == (mode != "none")
        assert {"rmsnorm", "fused_add_rmsnorm", "silu_and_mul", ROTATE} <= set(op_calls)
    assert tokens["full_and_piecewise"] == tokens["none"]

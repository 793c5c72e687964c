"""The `onednn` linear method: its contract, products of packed weights, freed unpacked weights."""

import pytest
import torch

from dovetail.interfaces import LinearShape
from dovetail_cpu import onednn_linear
from dovetail_cpu.onednn_linear import OneDNNLinearMethod, packs
from dovetail_devkit.suites.linear_method import check_linear_method

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if packs(dtype)]


def make_layer(dtype, *, bias=True, out_features=40, in_features=24):
    method, layer = OneDNNLinearMethod(), torch.nn.Module()
    shape = LinearShape(
        name="layer",
        in_features=in_features,
        part_names=("layer",),
        part_sizes=(out_features,),
        bias=bias,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    method.create(layer, shape)
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return method, layer


def test_the_linear_method_meets_its_contract():
    check_linear_method(OneDNNLinearMethod, torch.device("cpu"))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 65])
def test_matrix_products_of_packed_weights_equal_those_of_unpacked_weights(dtype, bias, num_tokens):
    method, layer = make_layer(dtype, bias=bias)
    x_TI = torch.randn(num_tokens, 24).to(dtype)
    weight_OI, offset_O = layer.weight.double(), layer.bias.double() if bias else 0.0
    expected_TO = x_TI.double() @ weight_OI.T + offset_O
    method.pack(layer)
    got_TO = method.apply(layer, x_TI)
    assert got_TO.is_contiguous() and got_TO.dtype == dtype
    slack = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(got_TO.double(), expected_TO, rtol=slack, atol=slack * 5)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_unpacked_weight_is_freed_unless_another_owner_keeps_it(dtype):
    method, layer = make_layer(dtype)
    owner = layer.weight
    before = owner.clone()
    method.pack(layer)
    assert "weight" not in dict(layer.named_parameters())
    assert torch.equal(owner, before)


@torch.inference_mode()
def test_without_onednn_the_unpacked_weight_is_used(monkeypatch):
    monkeypatch.setattr(onednn_linear, "packs", lambda dtype: False)
    method, layer = make_layer(torch.float32)
    x_TI = torch.randn(5, 24)
    method.pack(layer)
    torch.testing.assert_close(
        method.apply(layer, x_TI), torch.nn.functional.linear(x_TI, layer.weight, layer.bias)
    )


def test_weights_of_dtypes_that_onednn_cannot_multiply_are_not_packed():
    assert not packs(torch.float64)
    assert not packs(torch.int8)

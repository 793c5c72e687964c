"""Rounding to block types, compared with the values that the package `gguf` decodes."""

import pytest
import torch

from dovetail_quantize.rounding import BLOCK_TYPES, quantize_rows, type_that_fits

gguf = pytest.importorskip("gguf")
ERRORS = {"Q4_0": 0.086, "Q4_1": 0.072, "Q5_0": 0.044, "Q8_0": 0.006, "Q4_K": 0.071, "Q6_K": 0.018}
"""Maximum relative error of normally distributed weights, by block type."""


def decode(blocks_OB, name):
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(gguf.quants.dequantize(blocks_OB.numpy(), kind))


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * 0.02


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_dequantized_blocks_are_close_to_the_weights(name):
    weight_OI = normal(96, 512)
    blocks_OB = quantize_rows(weight_OI, name)
    assert blocks_OB.shape == (96, 512 * BLOCK_TYPES[name].bits_per_weight / 8)
    error = float((decode(blocks_OB, name) - weight_OI).norm() / weight_OI.norm())
    assert error < ERRORS[name]


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_dequantized_blocks_are_the_nearest_representable_values(name):
    kind = BLOCK_TYPES[name]
    weight_OI = normal(8, 512, seed=1)
    x_NGK = weight_OI.view(-1, kind.size // kind.group, kind.group)
    grid = kind.fit(x_NGK, torch.ones(()))
    values = kind.round(x_NGK, grid) * grid.scale + grid.minimum
    decoded_OI = decode(quantize_rows(weight_OI, name), name)
    assert torch.equal(decoded_OI, values.view(8, 512))
    inside = (x_NGK > values.amin(-1, keepdim=True)) & (x_NGK < values.amax(-1, keepdim=True))
    distance = (x_NGK - values).abs() / grid.scale.abs()
    assert float(distance[inside].max()) <= 0.5001


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_important_features_are_rounded_more_accurately(name):
    weight_OI = normal(64, 512, seed=2)
    importance_I = torch.ones(512)
    importance_I[::8] = 50.0
    plain_OI = decode(quantize_rows(weight_OI, name), name)
    weighted_OI = decode(quantize_rows(weight_OI, name, importance_I), name)
    before = (plain_OI - weight_OI)[:, ::8].norm()
    assert (weighted_OI - weight_OI)[:, ::8].norm() < 0.95 * before


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_the_error_does_not_exceed_that_of_the_gguf_package(name):
    kind = gguf.GGMLQuantizationType[name]
    weight_OI = normal(64, 512, seed=3)
    theirs_OB = torch.from_numpy(gguf.quants.quantize(weight_OI.numpy(), kind))
    other = (decode(theirs_OB, name) - weight_OI).norm()
    assert (decode(quantize_rows(weight_OI, name), name) - weight_OI).norm() <= other


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_zeros_and_constant_rows_are_preserved(name):
    weight_OI = torch.zeros(3, 256)
    weight_OI[1] = 0.5
    weight_OI[2] = -0.25
    decoded_OI = decode(quantize_rows(weight_OI, name), name)
    assert not decoded_OI[0].any()
    torch.testing.assert_close(decoded_OI[1:], weight_OI[1:], rtol=0.005, atol=0)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_rows_are_rounded_independently_of_other_rows(name):
    weight_OI = normal(40, 512, seed=4)
    together_OB = quantize_rows(weight_OI, name)
    assert torch.equal(quantize_rows(weight_OI[7:9], name), together_OB[7:9])


def test_the_first_type_whose_blocks_divide_a_row_is_chosen():
    assert type_that_fits(["Q4_K", "Q4_1"], 512) == "Q4_K"
    assert type_that_fits(["Q4_K", "Q4_1"], 576) == "Q4_1"
    assert type_that_fits(["Q4_K", "Q4_1"], 100) is None

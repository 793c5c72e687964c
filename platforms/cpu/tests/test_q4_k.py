"""The `q4_k` linear method: contract, accuracy, formats of layers, invalid weights."""

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError, WeightError
from dovetail.interfaces import LinearShape
from dovetail_cpu.native_library import probe_any
from dovetail_cpu_kernels.linear import KIND_NAMES
from dovetail_devkit.suites.linear_method import check_linear_method
from dovetail_torch.layers import ParallelLMHead

pytestmark = pytest.mark.skipif(not probe_any().usable, reason="native kernels are not available")


def make_layer(method, in_features, weight_OI=None, *, layer=None, dtype=torch.bfloat16):
    layer = layer or nn.Module()
    shape = LinearShape(
        name="model.layers.3.mlp.fused",
        in_features=in_features,
        part_names=("part_0", "part_1"),
        part_sizes=(40, 64),
        bias=False,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    method.create(layer, shape)
    if weight_OI is None:
        generator = torch.Generator().manual_seed(in_features)
        weight_OI = torch.randn(104, in_features, generator=generator)
    with torch.no_grad():
        layer.weight.copy_(weight_OI)
    return layer


def make(**options):
    from dovetail_cpu.quantized_linear import Q4KLinearMethod

    return Q4KLinearMethod(options)


def make_head():
    class Head(ParallelLMHead):
        def __init__(self):
            nn.Module.__init__(self)

    return Head()


def relative_error(method, in_features):
    generator = torch.Generator().manual_seed(7)
    weight_OI = torch.randn(104, in_features, generator=generator).bfloat16()
    x_TI = torch.randn(32, in_features, generator=generator).bfloat16()
    layer = make_layer(method, in_features, weight_OI)
    method.pack(layer)
    want_TO = x_TI.double() @ weight_OI.double().T
    return float((method.apply(layer, x_TI).double() - want_TO).norm() / want_TO.norm())


def test_the_linear_method_meets_its_contract():
    check_linear_method(type(make()), torch.device("cpu"))


@torch.inference_mode()
@pytest.mark.parametrize("in_features", [256, 288, 512])
def test_the_error_of_q4_k_is_at_most_90_percent_of_the_error_of_int4(in_features):
    from dovetail_cpu.quantized_linear import Int4LinearMethod

    error = relative_error(make(), in_features)
    assert 0.03 < error < 0.9 * relative_error(Int4LinearMethod(), in_features)


@pytest.mark.parametrize(
    ("in_features", "options", "kind"),
    [
        (512, {}, "Q4_K"),
        (288, {}, "Q4_1"),
        (288, {"fallback": "int8"}, "int8"),
        (100, {}, "int8"),
    ],
)
def test_the_number_of_input_features_decides_whether_the_fallback_format_is_used(
    in_features, options, kind
):
    layer = make_layer(make(**options), in_features)
    assert KIND_NAMES[layer.packed_spec.kind] == kind


@pytest.mark.parametrize(
    ("in_features", "head", "kind"),
    [
        (256, None, "Q6_K"),
        (256, "q6_k", "Q6_K"),
        (256, "int8", "int8"),
        (256, "q4_k", "Q4_K"),
        (256, "bfloat16", "bf16"),
        (288, None, "int8"),
        (288, "q6_k", "int8"),
        (288, "q4_k", "Q4_1"),
    ],
)
def test_the_head_option_sets_the_weight_format_of_the_lm_head(in_features, head, kind):
    method = make() if head is None else make(head=head)
    layer = make_layer(method, in_features, layer=make_head())
    assert KIND_NAMES[layer.packed_spec.kind] == kind


@torch.inference_mode()
@pytest.mark.parametrize("in_features", [256, 288, 100])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_error_for_a_weight_with_nan_or_infinity_names_it(in_features, value):
    method = make()
    layer = make_layer(method, in_features)
    layer.weight[50, 7] = value
    with pytest.raises(WeightError, match=r"of model\.layers\.3\.mlp\.part_1\.weight are NaN or"):
        method.pack(layer)


def packed_weight(weight_OI):
    """Return the values, in float64, of an LM head that is packed as Q6_K."""
    in_features = weight_OI.shape[1]
    method, head = make(head="q6_k"), make_head()
    layer = make_layer(method, in_features, weight_OI, layer=head)
    method.pack(layer)
    # An input feature that is alone is exact in 8 bits.
    ones = torch.eye(in_features, dtype=torch.bfloat16)
    return method.apply(layer, 127 * ones).double().T / 127


@torch.inference_mode()
@pytest.mark.parametrize("magnitude", [0.003, 1.0, 1e3])
def test_a_head_of_six_bits_has_a_rounding_error_below_two_percent(magnitude):
    generator = torch.Generator().manual_seed(3)
    weight_OI = (magnitude * torch.randn(104, 512, generator=generator)).bfloat16()
    error_OI = packed_weight(weight_OI) - weight_OI.double()
    relative_O = error_OI.norm(dim=1) / weight_OI.double().norm(dim=1)
    # Uniform steps of 1/32 of the greatest of 16 normal numbers, 1.77, have an error of 0.016.
    assert relative_O.min() > 0.012 and relative_O.max() < 0.019


@torch.inference_mode()
def test_a_head_of_six_bits_keeps_zeros_single_weights_and_whole_codes():
    weight_OI = torch.zeros(104, 256)
    weight_OI[1, 17] = -3.0
    weight_OI[2] = torch.arange(256) % 64 - 32.0
    weight_OI[3] = 1e-12
    values_OI = packed_weight(weight_OI)
    assert values_OI[0].abs().max() == 0 and values_OI[3].abs().max() == 0
    assert (values_OI[1, 17] / -3.0 - 1).abs() < 0.01 and values_OI[1].count_nonzero() == 1
    assert (values_OI[2] - weight_OI[2]).abs().max() < 0.3


@torch.inference_mode()
@pytest.mark.parametrize("value", [1e9, 1e29, 3e38, float("nan")])
def test_the_error_for_weights_beyond_the_range_of_a_six_bit_head_names_them(value):
    method = make(head="q6_k")
    layer = make_layer(method, 256, layer=make_head())
    layer.weight[50] = value
    named = r"of model\.layers\.3\.mlp\.part_1\.weight are NaN or infinite, or too large for Q6_K"
    with pytest.raises(WeightError, match=named):
        method.pack(layer)


@torch.inference_mode()
@pytest.mark.parametrize("in_features", [256, 288])
@pytest.mark.parametrize("value", [1e8, 1e29, 1e31, 3e38])
@pytest.mark.parametrize("sign", [1, -1])
def test_weights_beyond_the_range_of_a_block_do_not_become_zeros(in_features, value, sign):
    method = make()
    layer = make_layer(method, in_features)
    layer.weight[50] = sign * value
    with pytest.raises(WeightError, match=r"of model\.layers\.3\.mlp\.part_1\.weight are NaN or"):
        method.pack(layer)


def test_quantization_of_a_different_dtype_is_rejected_with_advice():
    with pytest.raises(ConfigError, match=r"quantization='q4_k'.*float32.*dtype='bfloat16'"):
        make_layer(make(), 256, dtype=torch.float32)


def test_packed_formats_differ_by_option():
    several = [
        make(),
        make(fallback="int8"),
        make(head="int8"),
        make(head="q4_k"),
        make(head="bfloat16"),
    ]
    assert len({method.packed_format() for method in several}) == len(several)

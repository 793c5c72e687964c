"""Refined groups of activations in the linear methods `int8` and `gguf`, and logits in float32."""

import logging

import pytest
import torch
from pydantic import ValidationError

from dovetail.errors import ConfigError
from dovetail.interfaces import ModelContext
from dovetail.plugins import PluginRegistry
from dovetail.plugins.plugin_details import read_options
from dovetail_cpu.native_library import probe_any
from dovetail_devkit.suites.linear_method import check_linear_method
from dovetail_torch.layers import BlockWeight, ParallelLinear, ParallelLMHead, TorchOps

pytestmark = pytest.mark.skipif(not probe_any().usable, reason="native kernels are not available")

CPU = torch.device("cpu")
IN_FEATURES, OUT_FEATURES = 512, 70


def make_method(name, **options):
    from dovetail_cpu import quantized_linear
    from dovetail_cpu.native_linear import NativeLinearMethod

    if name == "native":
        return NativeLinearMethod()
    classes = {
        "int8": quantized_linear.Int8LinearMethod,
        "gguf": quantized_linear.GGUFLinearMethod,
    }
    return classes[name](options)


def make_context(method):
    return ModelContext(
        hf_config={},
        dtype=torch.bfloat16,
        device=CPU,
        linear_method=method,
        ops=TorchOps(),
        max_model_len=8,
    )


def make_inputs(num_tokens):
    """Return inputs with a few large groups of 32."""
    generator = torch.Generator().manual_seed(2)
    x_TI = torch.randn(num_tokens, IN_FEATURES, generator=generator)
    x_TI[:, 64:96] *= 20
    x_TI[:, 320:352] *= 10
    return x_TI.bfloat16()


@torch.inference_mode()
def make_layer(name, **options):
    """Return a packed layer whose weights are exact in int8 and Q8_0, and its weights."""
    method = make_method(name, **options)
    layer = ParallelLinear(
        make_context(method), "model.layers.0.mlp.fused", IN_FEATURES, {"a": OUT_FEATURES}
    )
    generator = torch.Generator().manual_seed(1)
    codes_OI = torch.randint(-126, 127, (OUT_FEATURES, IN_FEATURES), generator=generator)
    codes_OI[:, ::32] = 127
    if name == "gguf":
        codes = codes_OI.to(torch.int8).view(OUT_FEATURES, -1, 32).view(torch.uint8)
        scales = torch.ones(OUT_FEATURES, IN_FEATURES // 32, 1, dtype=torch.float16)
        blocks = torch.cat([scales.view(torch.uint8), codes], dim=2).view(OUT_FEATURES, -1)
        layer.share_blocks(0, BlockWeight(type_name="Q8_0", rows_OB=blocks, is_mapped=False))
    else:
        layer.weight.copy_(codes_OI)
    method.pack(layer)
    return layer, codes_OI.double()


@torch.inference_mode()
def error_of(name, **options):
    layer, weight_OI = make_layer(name, **options)
    x_TI = make_inputs(40)
    want_TO = x_TI.double() @ weight_OI.T
    return float((layer(x_TI).double() - want_TO).norm() / want_TO.norm())


@pytest.mark.parametrize("name", ["int8", "gguf"])
def test_refined_groups_make_matrix_products_more_accurate(name):
    """The rounding of outputs to bfloat16 remains: less than 0.002."""
    none, large, most = (error_of(name, refined_groups=it) for it in ("none", "large", "most"))
    assert none > 0.005 and large < 0.002 and most < 0.002


@torch.inference_mode()
@pytest.mark.parametrize(("name", "default"), [("int8", "large"), ("gguf", "most")])
def test_groups_are_refined_by_default(name, default):
    x_TI = make_inputs(9)
    expected, _ = make_layer(name, refined_groups=default)
    actual, _ = make_layer(name)
    assert torch.equal(actual(x_TI), expected(x_TI))
    assert error_of(name) == error_of(name, refined_groups=default)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["int8", "gguf"])
def test_packed_weights_do_not_depend_on_the_refined_groups(name):
    forms, formats = [], set()
    for groups in ("none", "most"):
        layer, _ = make_layer(name, refined_groups=groups)
        forms.append(bytes(layer.linear_method.packed_form(layer)))
        formats.add(layer.linear_method.packed_format())
    assert forms[0] == forms[1] and len(formats) == 1


@pytest.mark.parametrize("name", ["int8", "gguf"])
def test_other_values_of_refined_groups_are_rejected(name):
    with pytest.raises(ValidationError, match="refined_groups"):
        make_method(name, refined_groups="all")


@pytest.mark.parametrize(("name", "default"), [("int8", "large"), ("gguf", "most")])
def test_the_log_names_the_refined_groups(name, default, caplog):
    caplog.set_level(logging.INFO)
    make_method(name)
    make_method(name, refined_groups="none")
    assert [record.getMessage() for record in caplog.records] == [
        f"The linear method {name} uses refined_groups={value}." for value in (default, "none")
    ]


@pytest.mark.parametrize("model", ["Int8Options", "GGUFOptions"])
def test_the_values_of_refined_groups_are_shown_without_importing_the_model(model):
    options = {field.name: field.type for field in read_options(f"dovetail_cpu.options:{model}")}
    assert options["refined_groups"] == "Literal['none', 'large', 'most']"


@pytest.mark.parametrize("name", ["int8", "gguf"])
def test_the_refined_linear_method_meets_its_contract(name):
    check_linear_method(type(make_method(name)), CPU)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["native", "int8"])
def test_logits_are_not_rounded_to_bfloat16(name):
    method = make_method(name)
    head = ParallelLMHead(make_context(method), "lm_head", OUT_FEATURES, IN_FEATURES)
    generator = torch.Generator().manual_seed(1)
    weight_VI = torch.randint(-126, 127, head.weight.shape, generator=generator)
    weight_VI[:, ::32] = 127
    head.weight.copy_(weight_VI)
    method.pack(head)
    x_TI = torch.zeros(5, IN_FEATURES, dtype=torch.bfloat16)
    x_TI[:, :3] = 127
    logits_TV = head(x_TI)
    assert logits_TV.dtype == torch.float32
    assert torch.equal(logits_TV.double(), x_TI.double() @ weight_VI.double().T)


def test_options_of_gguf_need_the_kind_because_a_tokenizer_has_the_same_name():
    pytest.importorskip("dovetail_gguf")
    options = {"refined_groups": "none"}
    with pytest.raises(ConfigError, match="write 'linear_method:gguf' or 'tokenizer:gguf'"):
        PluginRegistry(options={"gguf": options}).check_option_names([])
    registry = PluginRegistry(options={"linear_method:gguf": options})
    registry.check_option_names([])
    method = registry.load("linear_method", "gguf")
    assert registry.options_of("linear_method", method) == options

"""The native linear methods: contract, precision, shapes, invalid weights, cached bytes."""

from itertools import pairwise

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dovetail.errors import ConfigError, WeightError
from dovetail.interfaces import LinearShape, ModelContext, WeightLoaderContext
from dovetail.interfaces.linear_method import ExpertLayers
from dovetail_cpu.native_library import probe_any
from dovetail_devkit.suites.linear_method import check_linear_method
from dovetail_torch.layers import (
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    TorchOps,
    VocabParallelEmbedding,
    linear_layers,
    pack_linears,
)
from dovetail_torch.weights import SafetensorsLoader, assignment

pytestmark = pytest.mark.skipif(not probe_any().usable, reason="native kernels are not available")

CPU = torch.device("cpu")
LIMITS = {"native": 0.004, "int8": 0.012, "int4": 0.13}
"""Maximum relative error of a matrix product of normal numbers, by method; bf16 rounding is
0.002."""


def make(name, **options):
    from dovetail_cpu.native_linear import NativeLinearMethod
    from dovetail_cpu.quantized_linear import Int4LinearMethod, Int8LinearMethod

    classes = {"native": NativeLinearMethod, "int8": Int8LinearMethod, "int4": Int4LinearMethod}
    return classes[name](options) if options else classes[name]()


def make_experts(method, in_features, part_size, parts, *, num_experts=5):
    """Return the loaded layer of all experts, which is not packed yet."""
    layer = nn.Module()
    names = tuple(f"{expert}.{part}_proj" for expert in range(num_experts) for part in parts)
    layer.shape = LinearShape(
        name="model.layers.3.mlp.experts.fused",
        in_features=in_features,
        part_names=names,
        part_sizes=(part_size,) * len(names),
        bias=False,
        dtype=torch.bfloat16,
        device=CPU,
        num_experts=num_experts,
    )
    method.create(layer, layer.shape)
    generator = torch.Generator().manual_seed(in_features)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    return layer


def make_layer(method, in_features, part_sizes, *, bias=False, dtype=torch.bfloat16, seed=0):
    """Return a loaded layer that is not packed yet, and its weight and bias as float64."""
    layer = nn.Module()
    shape = LinearShape(
        name="model.layers.3.mlp.fused",
        in_features=in_features,
        part_names=tuple(f"part_{number}" for number in range(len(part_sizes))),
        part_sizes=tuple(part_sizes),
        bias=bias,
        dtype=dtype,
        device=CPU,
    )
    method.create(layer, shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    bias_O = layer.bias.double() if bias else torch.zeros(sum(part_sizes)).double()
    return layer, layer.weight.detach().double(), bias_O


@pytest.mark.costly
@pytest.mark.parametrize("name", LIMITS)
def test_the_linear_method_meets_its_contract(name):
    check_linear_method(type(make(name)), CPU)


@torch.inference_mode()
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("in_features", [1, 31, 64, 257])
@pytest.mark.parametrize("part_sizes", [(1,), (33, 7), (32, 64, 5), (31, 33)])
def test_matrix_products_are_correct_for_unaligned_sizes(name, in_features, part_sizes):
    method = make(name)
    layer, weight_OI, bias_O = make_layer(method, in_features, part_sizes, bias=True)
    method.pack(layer)
    assert not hasattr(layer, "weight")
    for num_tokens in (0, 1, 5, 40):
        generator = torch.Generator().manual_seed(num_tokens)
        wide_TI = torch.randn(num_tokens, 2 * in_features + 3, generator=generator).bfloat16()
        x_TI = wide_TI[:, 1 : in_features + 1]
        got_TO = method.apply(layer, x_TI)
        want_TO = x_TI.double() @ weight_OI.T + bias_O
        assert got_TO.shape == want_TO.shape and got_TO.is_contiguous()
        # The tolerance is relative to the expected size of the products, as single values may be
        # near 0.
        norms_TO = x_TI.double().norm(dim=1)[:, None] * weight_OI.norm(dim=1) + bias_O.abs()
        usual = norms_TO.norm() / in_features**0.5
        error = float((got_TO.double() - want_TO).norm())
        assert error <= 1.5 * LIMITS[name] * usual, (num_tokens, error, float(usual))


@pytest.fixture(params=range(7))
def level(request):
    """Select an instruction set level that this processor supports, for one test."""
    from dovetail_cpu_kernels import LEVELS, library

    before = library().dk_level()
    if not library().dk_supports_level(request.param):
        pytest.skip(f"this processor has no {LEVELS[request.param]}")
    library().dk_set_level(request.param)
    yield request.param
    library().dk_set_level(before)


@torch.inference_mode()
@pytest.mark.parametrize("name", LIMITS)
def test_every_instruction_set_reads_the_same_packed_bytes(name, level):
    from dovetail_cpu_kernels import library

    method = make(name)
    layer, weight_OI, _ = make_layer(method, 160, (64, 40))
    method.pack(layer)
    form = bytes(method.packed_form(layer))
    x_TI = torch.randn(9, 160, generator=torch.Generator().manual_seed(4)).bfloat16()
    want_TO = x_TI.double() @ weight_OI.T
    error = (method.apply(layer, x_TI).double() - want_TO).norm() / want_TO.norm()
    assert error < LIMITS[name]
    library().dk_set_level(library().dk_highest_level())
    other, _, _ = make_layer(method, 160, (64, 40))
    method.pack(other)
    assert bytes(method.packed_form(other)) == form


@torch.inference_mode()
def test_quantization_errors_increase_with_fewer_bits_and_stay_within_bounds():
    x_TI = torch.randn(16, 512, generator=torch.Generator().manual_seed(1)).bfloat16()
    errors = []
    for name in LIMITS:
        method = make(name)
        layer, weight_OI, _ = make_layer(method, 512, (256,))
        method.pack(layer)
        want_TO = x_TI.double() @ weight_OI.T
        got_TO = method.apply(layer, x_TI).double()
        errors.append(float((got_TO - want_TO).norm() / want_TO.norm()))
    assert all(error < limit for error, limit in zip(errors, LIMITS.values(), strict=True)), errors
    assert all(2 * low < high for low, high in pairwise(errors)), errors


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_native_method_uses_its_base_method_for_other_dtypes(dtype):
    method = make("native")
    layer, weight_OI, bias_O = make_layer(method, 40, (24,), bias=True, dtype=dtype)
    assert method.packed_bytes(layer) == 0
    method.pack(layer)
    x_TI = torch.randn(3, 40).to(dtype)
    want_TO = x_TI.double() @ weight_OI.T + bias_O
    got_TO = method.apply(layer, x_TI)
    assert got_TO.dtype == dtype
    torch.testing.assert_close(got_TO.double(), want_TO, rtol=5e-3, atol=2e-2)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantization_of_a_different_dtype_is_rejected_with_advice(name):
    with pytest.raises(ConfigError, match=rf"quantization='{name}'.*float32.*dtype='bfloat16'"):
        make_layer(make(name), 8, (8,), dtype=torch.float32)


@torch.inference_mode()
@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_error_for_a_weight_with_nan_or_infinity_names_it(name, value):
    method = make(name)
    layer, _, _ = make_layer(method, 48, (32, 32))
    layer.weight[40, 7] = value
    with pytest.raises(WeightError, match=r"1 values of model\.layers\.3\.mlp\.part_1\.weight"):
        method.pack(layer)
    layer, _, _ = make_layer(method, 48, (33, 31))
    layer.weight[40, 7] = value
    with pytest.raises(WeightError, match=r"1 values of model\.layers\.3\.mlp\.part_1\.weight are"):
        method.pack(layer)


@torch.inference_mode()
@pytest.mark.parametrize("name", LIMITS)
def test_restored_packed_weights_give_the_same_matrix_products(name):
    method = make(name)
    layer, _, _ = make_layer(method, 96, (64, 40), bias=True)
    method.pack(layer)
    form = method.packed_form(layer)
    assert form.readonly and len(form) == method.packed_bytes(layer)
    other = make(name)
    assert other.packed_format() == method.packed_format()
    again, _, _ = make_layer(other, 96, (64, 40), bias=True)
    with torch.no_grad():
        again.weight.fill_(float("nan"))
    # Any page-aligned memory may hold packed weights; this copy is page-aligned.
    from dovetail_cpu.linear_kernel import Arena

    copy = Arena().take(len(form))
    copy[:] = form
    other.restore(again, copy.toreadonly())
    assert again.settled == {"weight"}
    other.pack(again)
    assert not hasattr(again, "weight")
    x_TI = torch.randn(7, 96).bfloat16()
    assert torch.equal(other.apply(again, x_TI), method.apply(layer, x_TI))


@torch.inference_mode()
@pytest.mark.parametrize("name", LIMITS)
def test_restored_packed_experts_give_the_same_sums(name):
    def load(method):
        gate_up = make_experts(method, 48, 40, ("gate", "up"))
        return gate_up, make_experts(method, 40, 48, ("down",))

    def apply(method, layers):
        both = ExpertLayers(gate_up=layers[0], down=layers[1], ops=TorchOps())
        return method.apply_experts(both, x_TD, experts_TK, weights_TK)

    x_TD = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    experts_TK, weights_TK = torch.tensor([[4, 0]] * 7), torch.full((7, 2), 0.5)
    method = make(name)
    layers = load(method)
    for layer in layers:
        method.pack(layer)
        assert not hasattr(layer, "weight")
        assert len(method.packed_form(layer)) == method.packed_bytes(layer)
    other = make(name)
    again = load(other)
    for old, new in zip(layers, again, strict=True):
        other.restore(new, method.packed_form(old))
        other.pack(new)
    assert torch.equal(apply(other, again), apply(method, layers))


@torch.inference_mode()
@pytest.mark.parametrize("name", LIMITS)
def test_the_error_for_a_weight_with_nan_names_the_expert(name):
    method = make(name)
    layer = make_experts(method, 48, 40, ("gate", "up"))
    layer.weight[3 * 80 + 45, 7] = torch.nan
    with pytest.raises(
        WeightError, match=r"1 values of model\.layers\.3\.mlp\.experts\.3\.up_proj\.weight are"
    ):
        method.pack(layer)


def test_packed_formats_differ_by_method_and_option():
    formats = [
        make("native"),
        make("int8"),
        make("int8", head="bfloat16"),
        make("int4"),
        make("int4", group_size=64),
        make("int4", head="int4"),
    ]
    assert len({method.packed_format() for method in formats}) == len(formats)


class Model(nn.Module):
    """A model with an embedding, two fused layers and a tied LM head, large enough to be mapped."""

    def __init__(self, method, *, tied):
        super().__init__()
        context = ModelContext(
            hf_config={},
            dtype=torch.bfloat16,
            device=CPU,
            linear_method=method,
            ops=TorchOps(),
            max_model_len=8,
        )
        self.embed = VocabParallelEmbedding(context, 70, 64)
        self.mlp = MergedColumnParallelLinear(
            context, "mlp", 64, {"gate_proj": 96, "up_proj": 33}, bias=True
        )
        heads = HeadShape(num_heads=4, num_kv_heads=2, head_size=16)
        self.qkv = QKVParallelLinear(context, "qkv", 64, heads)
        tied_to = self.embed if tied else None
        self.lm_head = ParallelLMHead(context, "lm_head", 70, 64, tied_to=tied_to)


def make_weights(*, tied, dtype=torch.bfloat16):
    shapes = {
        "embed.weight": (70, 64),
        "gate_proj.weight": (96, 64),
        "up_proj.weight": (33, 64),
        "gate_proj.bias": (96,),
        "up_proj.bias": (33,),
        "q_proj.weight": (64, 64),
        "k_proj.weight": (32, 64),
        "v_proj.weight": (32, 64),
    }
    if not tied:
        shapes["lm_head.weight"] = (70, 64)
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(s, generator=generator).to(dtype) for name, s in shapes.items()}


@torch.inference_mode()
def load(path, method, *, tied):
    model = Model(method, tied=tied)
    SafetensorsLoader(WeightLoaderContext(model_dir=path, progress=False)).load(model)
    num_borrowed = [len(layer.borrowed) for _, layer in linear_layers(model)]
    pack_linears(model)
    return model, num_borrowed


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LIMITS)
def test_mapped_and_copied_weights_have_the_same_packed_bytes(name, tied, tmp_path, monkeypatch):
    save_file(make_weights(tied=tied), tmp_path / "model.safetensors")
    copied, none = load(tmp_path, make(name), tied=tied)
    monkeypatch.setattr(assignment, "BORROWED_BYTES", 4096)
    lent, borrowed = load(tmp_path, make(name), tied=tied)
    # q_proj (8 KiB), gate_proj (12), up_proj (4.1), k_proj and v_proj (4); biases are copied.
    assert not any(none) and borrowed == [2, 3, 0 if tied else 1]
    assert lent.embed.is_mapped and not copied.embed.is_mapped
    for (_, item), (_, other) in zip(linear_layers(copied), linear_layers(lent), strict=True):
        assert item.linear_method.packed_form(item) == other.linear_method.packed_form(other)
        assert not other.borrowed
    ids_T = torch.arange(70)
    assert torch.equal(copied.embed(ids_T), lent.embed(ids_T))
    x_TD = torch.randn(3, 64).bfloat16()
    assert torch.equal(copied.mlp(x_TD), lent.mlp(x_TD))


def test_weights_of_a_different_dtype_are_cast_and_copied_instead_of_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(assignment, "BORROWED_BYTES", 0)
    save_file(make_weights(tied=True, dtype=torch.float32), tmp_path / "model.safetensors")
    model, borrowed = load(tmp_path, make("native"), tied=True)
    assert not any(borrowed) and not model.embed.is_mapped


@pytest.mark.parametrize(
    ("name", "options", "head", "body"),
    [
        ("int8", {}, 1, 1),
        ("int8", {"head": "bfloat16"}, 0, 1),
        ("int4", {}, 1, 2),
        ("int4", {"head": "int4", "group_size": 64}, 2, 2),
    ],
)
def test_the_head_option_sets_the_weight_format_of_the_lm_head(name, options, head, body):
    model = Model(make(name, **options), tied=False)
    assert model.lm_head.packed_spec.kind == head and model.qkv.packed_spec.kind == body
    if body == 2:
        assert model.qkv.packed_spec.group == options.get("group_size", 32)


@torch.inference_mode()
def test_int8_sums_of_160000_inputs_do_not_overflow():
    """With one scale per token, sums of more than 131,072 products would overflow 32 bits."""
    method = make("int8")
    layer, _, _ = make_layer(method, 160_000, (1,))
    layer.weight.fill_(1.0)
    method.pack(layer)
    x_TI = torch.ones(1, 160_000).bfloat16()
    actual = float(method.apply(layer, x_TI))
    assert abs(actual / 160_000 - 1) < 0.012


def heavy_tailed(*size, generator):
    """Return normal numbers, a few multiplied by 30, like the outliers of trained models."""
    values = torch.randn(*size, generator=generator)
    return values * (1 + 29 * (torch.rand(*size, generator=generator) < 0.002))


@torch.inference_mode()
@pytest.mark.parametrize("seed", range(3))
def test_int8_is_nearly_as_accurate_as_int8_weights_with_16_bit_activations(seed):
    """The error is at most 1.2 times that of weights per channel and exact activations."""
    generator = torch.Generator().manual_seed(seed)
    weight_OI = heavy_tailed(192, 768, generator=generator).bfloat16()
    x_TI = heavy_tailed(64, 768, generator=generator).bfloat16()
    want_TO = x_TI.double() @ weight_OI.double().T
    scale_O1 = weight_OI.double().abs().amax(1, keepdim=True) / 127
    per_channel_OI = (weight_OI.double() / scale_O1).round() * scale_O1
    reference = (x_TI.double() @ per_channel_OI.T).bfloat16().double() - want_TO
    method = make("int8")
    layer, _, _ = make_layer(method, 768, (192,))
    layer.weight.copy_(weight_OI)
    method.pack(layer)
    error = method.apply(layer, x_TI).double() - want_TO
    assert error.norm() < 1.2 * reference.norm()

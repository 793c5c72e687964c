"""The layers: rotary tables compared with transformers, ops, linear layers, tied heads."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from dovetail.errors import ContractError, ModelError
from dovetail.interfaces.attention import RotaryArgs
from dovetail.interfaces.linear_method import LinearMethod, LinearShape
from dovetail.interfaces.model import ModelContext
from dovetail_torch.layers import (
    ACTIVATIONS,
    Attention,
    ColumnParallelLinear,
    HeadShape,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    TorchLinearMethod,
    TorchOps,
    VocabParallelEmbedding,
    attention_layers,
    gated_activation,
    pack_linears,
)
from dovetail_torch.layers.rope_frequencies import read_rope_parameters, rope_frequencies

OPS = TorchOps()
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "large_theta": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "yarn": YARN,
    "yarn_exact_ends": YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn_factor": YARN | {"attention_factor": 1.3},
}


def make_context(**changes: object) -> ModelContext:
    fields: dict = {
        "hf_config": {},
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "linear_method": TorchLinearMethod(),
        "ops": OPS,
        "max_model_len": 256,
    }
    return ModelContext(**(fields | changes))


def fill(module: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_size", [20, 64])
def test_rotary_embedding_equals_that_of_transformers(rope: str, head_size: int) -> None:
    config = transformers.LlamaConfig(
        head_dim=head_size,
        hidden_size=4 * head_size,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0} | ROPES[rope],
    )
    assert rope.startswith(("default", "large")) or ROPES[rope]["rope_type"] in ROPE_INIT_FUNCTIONS
    llama_rotary = LlamaRotaryEmbedding(config)
    rotary = RotaryEmbedding(make_context(hf_config=config.to_dict()), head_size)
    generator = torch.Generator().manual_seed(1)
    q_THS = torch.randn(9, 4, head_size, generator=generator)
    k_TKS = torch.randn(9, 2, head_size, generator=generator)
    positions_T = torch.tensor([0, 1, 2, 255, 17, 64, 63, 128, 3])
    q_before = q_THS.clone()
    cos, sin = llama_rotary(q_THS, positions_T[None])
    expected = apply_rotary_pos_emb(
        q_THS.transpose(0, 1)[None], k_TKS.transpose(0, 1)[None], cos, sin
    )
    for turned, reference in zip(rotary(q_THS, k_TKS, positions_T), expected, strict=True):
        torch.testing.assert_close(turned, reference[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert torch.equal(q_THS, q_before)


def test_an_override_of_rope_scaling_keeps_rope_theta() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    one_form = {"rope_parameters": scaling | {"rope_theta": 5e5}}
    override = {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": scaling}
    tables = [
        RotaryEmbedding(make_context(hf_config=config), 16).cos_sin_PR
        for config in (one_form, override)
    ]
    assert torch.equal(*tables)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rope_theta": 1.0}, "rope_theta"),
        ({"beta_fast": 1e-320}, "beta_fast"),
        ({"factor": 1e-40}, "factor"),
    ],
)
def test_the_error_for_an_invalid_yarn_parameter_contains_its_name(
    fields: dict, field: str
) -> None:
    config = {"rope_parameters": YARN | fields}
    with pytest.raises(ModelError, match=rf"config.json: .*{field}"):
        RotaryEmbedding(make_context(hf_config=config), 16)
    assert RotaryEmbedding(make_context(hf_config={"rope_parameters": YARN}), 16)


def test_partial_rotary_does_not_change_the_other_features() -> None:
    config = {"partial_rotary_factor": 0.5, "rope_theta": 100.0}
    rotary = RotaryEmbedding(make_context(hf_config=config), 16)
    x_THS = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(2))
    positions_T = torch.tensor([5, 0, 9])
    turned, _ = rotary(x_THS, x_THS, positions_T)
    whole, _ = RotaryEmbedding(make_context(hf_config={"rope_theta": 100.0}), 8)(
        x_THS[..., :8], x_THS[..., :8], positions_T
    )
    assert torch.equal(turned[..., 8:], x_THS[..., 8:])
    assert torch.equal(turned[..., :8], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotary_embedding_computes_in_float32(dtype: torch.dtype) -> None:
    rotary = RotaryEmbedding(make_context(), 32)
    x_THS = torch.randn(50, 3, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    positions_T = torch.arange(200, 250)
    turned, _ = rotary(x_THS, x_THS, positions_T)
    exact, _ = rotary(x_THS.float(), x_THS.float(), positions_T)
    assert turned.dtype is dtype
    assert torch.equal(turned, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_that_of_transformers(dtype: torch.dtype) -> None:
    norm = RMSNorm(make_context(dtype=dtype), 24, 1e-5)
    fill(norm)
    reference = LlamaRMSNorm(24, 1e-5).to(dtype)
    reference.weight.data.copy_(norm.weight)
    x_TD = torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(4)).to(dtype)
    torch.testing.assert_close(norm(x_TD), reference(x_TD).detach())


def test_rms_norm_with_residual_returns_the_normalized_sum_and_the_sum() -> None:
    norm = RMSNorm(make_context(), 8, 1e-6)
    fill(norm)
    x_TD, residual_TD = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5))
    total_TD = x_TD + residual_TD
    x_before = x_TD.clone()
    normed_TD, sum_TD = norm.add(x_TD, residual_TD)
    assert torch.equal(sum_TD, total_TD)
    assert torch.equal(normed_TD, norm(total_TD))
    assert torch.equal(x_TD, x_before)


def test_silu_and_mul_applies_silu_to_the_first_half() -> None:
    x_T2D = torch.randn(4, 10, generator=torch.Generator().manual_seed(6))
    before = x_T2D.clone()
    gate_TD, up_TD = x_T2D[:, :5], x_T2D[:, 5:]
    expected = gate_TD / (1 + (-gate_TD).exp()) * up_TD
    torch.testing.assert_close(OPS.silu_and_mul(x_T2D), expected)
    assert torch.equal(x_T2D, before)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_a_gated_activation_multiplies_the_second_half_by_the_activated_first_half(name) -> None:
    called = []

    class Recording(TorchOps):
        def __getattribute__(self, operation):
            called.append(operation)
            return super().__getattribute__(operation)

    activation = gated_activation(make_context(ops=Recording()), name)
    x_T2D = torch.randn(4, 10, generator=torch.Generator().manual_seed(6))
    expected = ACTIVATIONS[name](x_T2D[:, :5]) * x_T2D[:, 5:]
    called.clear()
    torch.testing.assert_close(activation(x_T2D), expected)
    fused = {"silu": ["silu_and_mul"], "gelu": [], "relu": []}
    assert called == fused.get(name, ["gelu_tanh_and_mul"])


def test_fused_linears_equal_their_concatenated_parts() -> None:
    heads = HeadShape(num_heads=4, num_kv_heads=2, head_size=6)
    qkv = QKVParallelLinear(make_context(), "layers.0.self_attn.qkv_proj", 10, heads, bias=True)
    fill(qkv)
    x_TI = torch.randn(3, 10, generator=torch.Generator().manual_seed(7))
    assert qkv.shape.part_names == ("q_proj", "k_proj", "v_proj")
    assert qkv.shape.part_sizes == (24, 12, 12)
    q_THS, k_TKS, v_TKS = qkv.split(qkv(x_TI))
    expected = x_TI @ qkv.weight.T + qkv.bias
    torch.testing.assert_close(q_THS, expected[:, :24].view(3, 4, 6))
    torch.testing.assert_close(k_TKS, expected[:, 24:36].view(3, 2, 6))
    torch.testing.assert_close(v_TKS, expected[:, 36:].view(3, 2, 6))


def test_linear_layers_pass_their_shape_to_the_linear_method() -> None:
    column = ColumnParallelLinear(make_context(dtype=torch.bfloat16), "a.b.up", 4, 7, bias=True)
    row = RowParallelLinear(make_context(), "a.b.down", 7, 4)
    merged = MergedColumnParallelLinear(make_context(), "a.gate_up", 4, {"gate": 3, "up": 5})
    assert (column.shape.name, column.shape.part_names) == ("a.b.up", ("up",))
    assert (column.weight.shape, column.weight.dtype) == ((7, 4), torch.bfloat16)
    assert (row.weight.shape, row.bias) == ((4, 7), None)
    assert (merged.shape.part_names, merged.shape.out_features) == (("gate", "up"), 8)
    assert not any(p.requires_grad for p in column.parameters())


class RecordingMethod(TorchLinearMethod):
    """A linear method that packs a weight by removing it from the layer."""

    def __init__(self) -> None:
        self.packed: list[str] = []

    def pack(self, layer: nn.Module) -> None:
        self.packed.append(layer.shape.name)
        transposed_IO = layer.weight.T.contiguous()
        del layer.weight
        layer.register_buffer("packed_IO", transposed_IO, persistent=False)

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI @ layer.packed_IO


def test_a_tied_lm_head_shares_the_weight_and_is_packed() -> None:
    method = RecordingMethod()
    context = make_context(linear_method=method)
    model = nn.Module()
    model.embed = VocabParallelEmbedding(context, 11, 4)
    model.head = ParallelLMHead(context, "head", 11, 4, tied_to=model.embed)
    model.other = ColumnParallelLinear(context, "other", 4, 4)
    fill(model)
    assert model.head.weight is model.embed.weight
    pack_linears(model)
    assert method.packed == ["head", "other"]
    hidden_SD = model.embed(torch.tensor([3, 0]))
    torch.testing.assert_close(model.head(hidden_SD), hidden_SD @ model.embed.weight.T)


class ScaledMethod(LinearMethod):
    """A linear method with two parameters per layer, so that a head cannot be tied."""

    def create(self, layer: nn.Module, shape: LinearShape) -> None:
        layer.qweight = nn.Parameter(torch.empty(shape.out_features, 1), requires_grad=False)
        layer.scales = nn.Parameter(torch.empty(shape.out_features), requires_grad=False)

    def pack(self, layer: nn.Module) -> None:
        pass

    def apply(self, layer: nn.Module, x_TI: torch.Tensor) -> torch.Tensor:
        return x_TI


def test_an_lm_head_cannot_be_tied_if_the_linear_method_has_additional_parameters() -> None:
    context = make_context(linear_method=ScaledMethod())
    embed = VocabParallelEmbedding(context, 11, 4)
    with pytest.raises(ModelError, match="ScaledMethod stores head as qweight, scales"):
        ParallelLMHead(context, "head", 11, 4, tied_to=embed)


def test_attention_layers_are_ordered_by_index() -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=16)
    model = nn.Module()
    model.second = Attention(heads, 1, sliding_window=5, soft_cap=30.0)
    model.first = Attention(heads, 0, scale=0.5)
    (first_name, first), (second_name, second) = attention_layers(model)
    assert (first_name, second_name) == ("first", "second")
    assert (first.scale, second.scale) == (0.5, 0.25)
    assert (second.sliding_window, second.soft_cap) == (5, 30.0)
    model.third = Attention(heads, 1)
    with pytest.raises(ContractError, match=r"\[0, 1, 1\]"):
        attention_layers(model)


@pytest.mark.parametrize("sinks", [torch.zeros(3), torch.zeros(2).half()])
def test_sinks_of_a_different_dtype_or_shape_are_rejected(sinks) -> None:
    heads = HeadShape(num_heads=2, num_kv_heads=1, head_size=16)
    assert Attention(heads, 0, sinks=nn.Parameter(torch.zeros(2))).sinks is not None
    with pytest.raises(ContractError, match="layer 7 has sinks"):
        Attention(heads, 7, sinks=nn.Parameter(sinks))


class OrderOfCalls:
    """An attention context that returns q + index + v - k, with the first head of v and k."""

    def attend(
        self,
        index: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        rotary_args: RotaryArgs | None = None,
    ) -> torch.Tensor:
        self.rotary_args = rotary_args
        return q_THD + index + v_TKD[:, :1] - k_TKD[:, :1]


@pytest.mark.parametrize("theta", [1.0000000000000002, 0.9999999999999999])
def test_a_ramp_of_yarn_may_begin_beyond_all_integers_of_64_bits(theta: float) -> None:
    config = {
        "rope_theta": theta,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1e-29, "beta_slow": 1.0},
        "max_position_embeddings": 2**31 - 1,
    }
    frequency_F, scale = rope_frequencies(read_rope_parameters(config), 8192)
    assert frequency_F.isfinite().all() and scale > 1


def test_the_attention_layer_passes_its_index_and_flattens_the_heads() -> None:
    layer = Attention(HeadShape(num_heads=2, num_kv_heads=1, head_size=3), 4)
    q_THD = torch.arange(12.0).view(2, 2, 3)
    k_TKD = torch.ones(2, 1, 3)
    context = OrderOfCalls()
    out = layer(q_THD, k_TKD, 3 * k_TKD, context)
    assert torch.equal(out, (q_THD + 6).view(2, 6)) and context.rotary_args is None
    rotary_args = RotaryArgs(
        ops=TorchOps(), positions_T=torch.tensor([0, 1]), cos_sin_PR=torch.ones(2, 2)
    )
    layer(q_THD, k_TKD, 3 * k_TKD, context, rotary_args)
    assert context.rotary_args is rotary_args

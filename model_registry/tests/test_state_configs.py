"""Fields of config.json of recurrent models: layers, defaults, and errors with the field."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from transformers import RecurrentGemmaConfig, RecurrentGemmaModel

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces.model import ModelContext, OneRank
from dovetail_models.decoder import GatedMLP, SelfAttention, SparseMLP
from dovetail_models.decoder.gated_recurrence import RecurrentBranch
from dovetail_models.families.mamba2 import Mamba2ForCausalLM
from dovetail_models.families.qwen3_next import (
    GatedDeltaNet,
    GatedSelfAttention,
    Qwen3NextForCausalLM,
)
from dovetail_models.families.recurrent_gemma import RecurrentGemmaForCausalLM
from dovetail_torch.layers import TorchLinearMethod, TorchOps
from dovetail_torch.weights.weight_names import WeightNames

MAMBA2 = {
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 2,
    "state_size": 10,
}
NEXT = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
}
GRIFFIN = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 18,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
}
MODELS = {
    "mamba2": (Mamba2ForCausalLM, MAMBA2),
    "next": (Qwen3NextForCausalLM, NEXT),
    "griffin": (RecurrentGemmaForCausalLM, GRIFFIN),
}


def make_model(kind: str, ranks: OneRank | None = None, **changes: object) -> nn.Module:
    model_cls, config = MODELS[kind]
    context = ModelContext(
        hf_config=config | changes,
        dtype=torch.bfloat16,
        device=torch.device("meta"),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
        ranks=ranks or OneRank(),
    )
    return model_cls(context)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("mamba2", {"expand": 3}, ("hidden_size 24 times expand 3", "num_heads 6")),
        ("mamba2", {"n_groups": 4}, ("num_heads 6", "n_groups 4")),
        ("mamba2", {"n_groups": 0}, ("n_groups is 0",)),
        ("mamba2", {"state_size": 10**6}, ("state_size is 1000000", "at most")),
        ("mamba2", {"conv_kernel": 1}, ("conv_kernel is 1", "from 2")),
        ("mamba2", {"conv_kernel": 65}, ("conv_kernel is 65", "at most 64")),
        ("mamba2", {"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
        ("mamba2", {"time_step_limit": 3}, ("time_step_limit is 3", "list of two numbers")),
        ("mamba2", {"time_step_limit": [0, "big"]}, ("time_step_limit", "list of two numbers")),
        ("mamba2", {"time_step_limit": [2, 1]}, ("time_step_limit is [2, 1]", "ascending")),
        ("mamba2", {"time_step_limit": [-1, 1]}, ("time_step_limit", "non-negative")),
        ("mamba2", {"time_step_limit": [0, math.nan]}, ("time_step_limit", "non-negative")),
        ("mamba2", {"time_step_limit": [0, 10**400]}, ("time_step_limit", "non-negative")),
        ("mamba2", {"time_step_limit": [10**400, math.inf]}, ("time_step_limit", "non-negative")),
        ("mamba2", {"use_bias": 1}, ("use_bias is 1",)),
        ("next", {"layer_types": ["full_attention"]}, ("layer_types", "list of 8 values")),
        ("next", {"layer_types": ["sliding"] * 8}, ("layer_types", "or linear_attention")),
        ("next", {"layer_types": 7}, ("layer_types is 7",)),
        ("next", {"full_attention_interval": 0}, ("full_attention_interval is 0",)),
        ("next", {"linear_num_value_heads": 5}, ("linear_num_value_heads 5", "key_heads 2")),
        ("next", {"linear_key_head_dim": 10**5}, ("linear_key_head_dim is 100000", "at most")),
        ("next", {"linear_value_head_dim": 0}, ("linear_value_head_dim is 0",)),
        ("next", {"linear_conv_kernel_dim": 1}, ("linear_conv_kernel_dim is 1", "from 2")),
        ("next", {"num_experts_per_tok": 5}, ("num_experts_per_tok is 5", "4 experts")),
        ("griffin", {"vocab_size": None}, ("vocab_size is absent",)),
        ("griffin", {"hidden_size": None}, ("hidden_size is absent",)),
        ("griffin", {"num_attention_heads": None}, ("num_attention_heads is absent",)),
        ("griffin", {"num_hidden_layers": 10**6}, ("num_hidden_layers is 1000000",)),
        ("griffin", {"num_key_value_heads": 3}, ("num_key_value_heads 3",)),
        ("griffin", {"intermediate_size": 1}, ("intermediate_size is 1", "from 2")),
        ("griffin", {"lru_width": 26}, ("lru_width 26", "num_attention_heads 4")),
        ("griffin", {"lru_width": 0}, ("lru_width is 0",)),
        ("griffin", {"lru_width": 2**20}, ("lru_width / num_attention_heads is 262144", "at most")),
        ("griffin", {"conv1d_width": 1}, ("conv1d_width is 1", "from 2")),
        ("griffin", {"conv1d_width": 65}, ("conv1d_width is 65", "at most 64")),
        ("griffin", {"attention_window_size": 0}, ("attention_window_size is 0",)),
        ("griffin", {"logits_soft_cap": 0}, ("logits_soft_cap is 0",)),
        ("griffin", {"logits_soft_cap": math.nan}, ("logits_soft_cap is nan",)),
        ("griffin", {"hidden_activation": "silu"}, ("hidden_activation", "'silu'")),
        ("griffin", {"attention_bias": "no"}, ("attention_bias is 'no'",)),
        ("griffin", {"block_types": []}, ("block_types is []", "recurrent or attention")),
        ("griffin", {"block_types": "recurrent"}, ("block_types is 'recurrent'", "list")),
        ("griffin", {"block_types": ["recurrent", "ssm"]}, ("block_types", "'ssm'")),
        ("griffin", {"block_types": ["recurrent"] * 10_001}, ("block_types has 10001", "at most")),
    ],
)
def test_the_error_for_an_invalid_config_value_names_its_field(kind, changes, words):
    with pytest.raises(ModelError) as caught:
        make_model(kind, **changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (None, (0.0, math.inf)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
        ([0, math.inf], (0.0, math.inf)),
        ([0.25, 3], (0.25, 3.0)),
    ],
)
def test_the_limits_of_time_steps_are_read(stated, expected):
    model = make_model("mamba2", time_step_limit=stated)
    assert model.model.layers[0].self_attn.limits == expected


def test_every_fourth_layer_of_qwen3_next_has_attention():
    kinds = [type(layer.self_attn) for layer in make_model("next").model.layers]
    assert kinds == 2 * [GatedDeltaNet, GatedDeltaNet, GatedDeltaNet, GatedSelfAttention]
    stated = ["full_attention", *["linear_attention"] * 7]
    model = make_model("next", layer_types=stated, mlp_only_layers=[1])
    assert isinstance(model.model.layers[0].self_attn, GatedSelfAttention)
    mlps = [type(layer.mlp) for layer in model.model.layers]
    assert mlps == [SparseMLP, GatedMLP, *[SparseMLP] * 6]


def test_each_rank_has_states_for_its_heads_only():
    mixer = make_model("mamba2").model.layers[0].self_attn
    shapes = [(tensor.shape, tensor.dtype) for tensor in mixer.attn.tensors]
    assert shapes == [((3, 48 + 2 * 20), torch.bfloat16), ((6, 10, 8), torch.float32)]
    mixer = make_model("mamba2", OneRank(rank=1, size=2)).model.layers[0].self_attn
    assert [tensor.shape for tensor in mixer.attn.tensors] == [(3, 24 + 2 * 10), (3, 10, 8)]
    # All ranks have the only group of a layer with one.
    one = make_model("mamba2", OneRank(rank=1, size=3), n_groups=1).model.layers[0].self_attn
    assert [tensor.shape for tensor in one.attn.tensors] == [(3, 16 + 2 * 10), (2, 10, 8)]
    net = make_model("next", OneRank(size=2)).model.layers[0].self_attn
    assert [tensor.shape for tensor in net.attn.tensors] == [(3, 2 * 10 + 36), (3, 10, 12)]
    griffin = make_model("griffin", OneRank(size=2), lru_width=40, intermediate_size=16)
    branch = griffin.model.layers[0].self_attn
    assert [tensor.shape for tensor in branch.attn.tensors] == [(3, 20), (20,)]


def test_the_block_types_of_griffin_are_repeated():
    def kinds(**changes):
        layers = make_model("griffin", **changes).model.layers
        return [type(layer.self_attn) for layer in layers]

    recurrent, attention = RecurrentBranch, SelfAttention
    assert kinds() == [recurrent, recurrent, attention, recurrent, recurrent]
    pattern = ["attention", "recurrent"]
    assert kinds(block_types=pattern) == [attention, recurrent, attention, recurrent, attention]
    assert kinds(block_types=pattern * 9) == kinds(block_types=pattern)


def test_the_names_of_the_weights_of_griffin_depend_on_the_type_of_layer():
    names = WeightNames.of(make_model("griffin"))
    last = [names.to_checkpoint(f"model.layers.{index}.self_attn.o_proj.bias") for index in (1, 2)]
    own = "model.layers.{}.temporal_block.{}.bias"
    assert last == [own.format(1, "linear_out"), own.format(2, "o_proj")]
    for index, name in enumerate(last, 1):
        assert names.to_model(name)[0] == (f"model.layers.{index}.self_attn.o_proj.bias",)


def test_the_defaults_of_griffin_are_those_of_transformers():
    config = RecurrentGemmaConfig(**GRIFFIN)
    model = make_model("griffin")
    branch, attention = (model.model.layers[index].self_attn for index in (0, 2))
    rope = model.read_shape(GRIFFIN).ropes[2]
    assert attention.attn.sliding_window == config.attention_window_size
    assert rope.rotary_dim == 8 * config.rope_parameters["partial_rotary_factor"]
    assert branch.conv_1d.width == config.conv1d_width
    assert branch.o_proj.shape.in_features == config.lru_width
    assert model.logit_cap == config.logits_soft_cap
    # The scale is rounded to bfloat16: the root of 32 is 5.657.
    assert model.model.embedding_scale == RecurrentGemmaModel(config).normalizer.item() == 5.65625
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.layers[0].mlp.down_proj.shape.in_features == 9
    assert model.read_shape(GRIFFIN | {"intermediate_size": 19}).intermediate_size == 9


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba2", "the 2 groups of heads of"),
        ("next", "the 2 heads of"),
        ("griffin", "the 4 heads of"),
    ],
)
def test_heads_that_cannot_be_sharded_evenly_are_rejected(kind, words):
    with pytest.raises(ConfigError, match=words):
        make_model(kind, OneRank(size=3))

"""Fields of config.json of Mamba 2 and Qwen3-Next: layers, defaults, and errors with the field."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dovetail.errors import ConfigError, ModelError
from dovetail.interfaces.model import ModelContext, OneRank
from dovetail_models.decoder import GatedMLP, SparseMLP
from dovetail_models.families.mamba2 import Mamba2ForCausalLM
from dovetail_models.families.qwen3_next import (
    GatedDeltaNet,
    GatedSelfAttention,
    Qwen3NextForCausalLM,
)
from dovetail_torch.layers import TorchLinearMethod, TorchOps

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
MODELS = {"mamba2": (Mamba2ForCausalLM, MAMBA2), "next": (Qwen3NextForCausalLM, NEXT)}


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


@pytest.mark.parametrize(
    ("kind", "words"), [("mamba2", "the 2 groups of heads of"), ("next", "the 2 heads of")]
)
def test_heads_that_cannot_be_divided_among_ranks_are_rejected(kind, words):
    with pytest.raises(ConfigError, match=words):
        make_model(kind, OneRank(size=3))

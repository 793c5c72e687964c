"""Fields of config.json of models with experts: errors name the field."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_models.decoder import GatedMLP, SparseMLP
from dovetail_models.families.mixtral import MixtralForCausalLM
from dovetail_models.families.qwen_moe import Qwen2MoeForCausalLM, Qwen3MoeForCausalLM
from dovetail_torch.layers import TorchLinearMethod, TorchOps, attention_layers

SMALL = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 16,
    "moe_intermediate_size": 6,
    "shared_expert_intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}


def make_model(model_cls: type, **changes: object) -> nn.Module:
    context = ModelContext(
        hf_config=SMALL | changes,
        dtype=torch.float32,
        device=torch.device("meta"),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
    )
    return model_cls(context)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 1}, ("num_experts is 1", "from 2")),
        ({"num_experts": 10**6}, ("num_experts is 1000000", "4096")),
        (
            {"num_experts": 4096, "num_hidden_layers": 2048},
            ("num_experts is 4096", "num_hidden_layers is 2048", "131072 experts"),
        ),
        ({"num_experts": "many"}, ("num_experts", "'many'")),
        ({"num_experts_per_tok": 6}, ("num_experts_per_tok is 6", "5 experts")),
        ({"num_experts_per_tok": 0}, ("num_experts_per_tok is 0",)),
        ({"moe_intermediate_size": -3}, ("moe_intermediate_size is -3",)),
        ({"norm_topk_prob": "yes"}, ("norm_topk_prob", "'yes'")),
        ({"decoder_sparse_step": 0}, ("decoder_sparse_step is 0",)),
        ({"mlp_only_layers": [4]}, ("mlp_only_layers is [4]", "from 0 to 3")),
        ({"mlp_only_layers": "all"}, ("mlp_only_layers is all",)),
    ],
)
def test_the_error_for_an_invalid_config_value_names_its_field(changes, words):
    with pytest.raises(ModelError) as failure:
        make_model(Qwen3MoeForCausalLM, **changes)
    assert all(word in str(failure.value) for word in words), failure.value


def test_layers_have_experts_or_a_dense_mlp():
    def kinds(**changes):
        model = make_model(Qwen3MoeForCausalLM, **changes)
        return [type(layer.mlp) for layer in model.model.layers]

    assert kinds() == [SparseMLP] * 4
    assert kinds(mlp_only_layers=[1]) == [SparseMLP, GatedMLP, SparseMLP, SparseMLP]
    assert kinds(decoder_sparse_step=2) == [GatedMLP, SparseMLP, GatedMLP, SparseMLP]


def test_both_names_for_the_expert_count_are_read():
    renamed = make_model(MixtralForCausalLM, num_experts=None, num_local_experts=7)
    assert renamed.model.layers[0].mlp.gate.weight.shape == (7, 24)
    default = make_model(MixtralForCausalLM, num_experts=None)
    assert default.model.layers[0].mlp.gate.weight.shape == (8, 24)


def test_even_qwen2_moe_layers_below_max_window_layers_have_sliding_windows():
    model = make_model(
        Qwen2MoeForCausalLM, use_sliding_window=True, sliding_window=9, max_window_layers=3
    )
    assert [layer.sliding_window for _, layer in attention_layers(model)] == [9, 0, 9, 0]

"""Fields of config.json of Llama 4: layers, chunks, and errors that name the field."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dovetail.errors import ModelError
from dovetail.interfaces.model import ModelContext
from dovetail_models.decoder import GatedMLP, SparseMLP
from dovetail_models.families.llama4 import Llama4ForCausalLM
from dovetail_torch.layers import TorchLinearMethod, TorchOps

SMALL = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 16,
    "intermediate_size_mlp": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 5,
}


def make_model(**changes: object) -> nn.Module:
    context = ModelContext(
        hf_config=SMALL | changes,
        dtype=torch.float32,
        device=torch.device("meta"),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
    )
    return Llama4ForCausalLM(context)


def chunks(**changes: object) -> list[int]:
    return [layer.self_attn.attn.chunk_size for layer in make_model(**changes).model.layers]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_chunk_size": 0}, ("attention_chunk_size is 0",)),
        ({"attention_chunk_size": "many"}, ("attention_chunk_size", "'many'")),
        ({"attention_chunk_size": None}, ("attention_chunk_size is null", "chunked_attention")),
        ({"layer_types": ["sliding_attention"] * 4}, ("layer_types", "or chunked_attention")),
        ({"layer_types": ["full_attention"]}, ("layer_types", "list of 4 values")),
        ({"layer_types": 7}, ("layer_types is 7",)),
        ({"no_rope_layers": [1, 0, 2, 1]}, ("no_rope_layers", "each 0 or 1")),
        ({"no_rope_layers": [1]}, ("no_rope_layers is [1]", "list of 4")),
        ({"no_rope_layer_interval": 0}, ("no_rope_layer_interval is 0",)),
        ({"moe_layers": [4]}, ("moe_layers is [4]", "from 0 to 3")),
        ({"moe_layers": "all"}, ("moe_layers is 'all'",)),
        ({"moe_layers": [True]}, ("moe_layers is [True]",)),
        ({"interleave_moe_layer_step": 0}, ("interleave_moe_layer_step is 0",)),
        ({"num_local_experts": 1}, ("num_local_experts is 1", "from 2")),
        ({"num_experts_per_tok": 6}, ("num_experts_per_tok is 6", "5 experts")),
        ({"intermediate_size_mlp": -1}, ("intermediate_size_mlp is -1",)),
        ({"floor_scale": 0}, ("floor_scale is 0",)),
        ({"attn_scale": -0.1}, ("attn_scale is -0.1",)),
        ({"use_qk_norm": "yes"}, ("use_qk_norm", "'yes'")),
        ({"attn_temperature_tuning": 4}, ("attn_temperature_tuning is 4",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "'gelu'")),
    ],
)
def test_the_error_for_an_invalid_config_value_names_its_field(changes, words):
    make_model()
    with pytest.raises(ModelError) as failure:
        make_model(**changes)
    assert all(word in str(failure.value) for word in words), failure.value


def test_layers_with_rotary_positions_have_chunks_unless_layer_types_overrides_it():
    assert chunks() == [8192, 8192, 8192, 0]
    assert chunks(no_rope_layers=[0, 1, 0, 1], attention_chunk_size=16) == [0, 16, 0, 16]
    kinds = ["full_attention", "full_attention", "full_attention", "chunked_attention"]
    assert chunks(layer_types=kinds, attention_chunk_size=16) == [0, 0, 0, 16]
    full = ["full_attention"] * 4
    assert chunks(layer_types=full, attention_chunk_size=None) == [0] * 4


def test_layers_have_experts_or_a_dense_mlp_with_its_own_size():
    def kinds(**changes):
        return [type(layer.mlp) for layer in make_model(**changes).model.layers]

    assert kinds() == [SparseMLP] * 4
    assert kinds(interleave_moe_layer_step=2) == [GatedMLP, SparseMLP, GatedMLP, SparseMLP]
    assert kinds(moe_layers=[1]) == [GatedMLP, SparseMLP, GatedMLP, GatedMLP]
    model = make_model(moe_layers=[])
    assert model.model.layers[0].mlp.down_proj.weight.shape == (24, 20)

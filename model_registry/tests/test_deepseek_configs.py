"""DeepSeek V2 and V3: errors name the field of config.json; names and layouts of weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DeepseekV3Config
from transformers import DeepseekV3ForCausalLM as ReferenceModel

from dovetail.errors import ConfigError, ModelError, WeightError
from dovetail.interfaces.model import ModelContext, OneRank
from dovetail.interfaces.weight_loader import WeightLoaderContext
from dovetail_models.decoder import GatedMLP, SparseMLP
from dovetail_models.families.deepseek import DeepseekV2ForCausalLM, DeepseekV3ForCausalLM
from dovetail_torch.layers import TorchLinearMethod, TorchOps, attention_layers
from dovetail_torch.weights.safetensors_loader import SafetensorsLoader

SMALL = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "q_lora_rank": 9,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}


def make_model(model_cls: type, ranks: OneRank, device: str, **changes: object) -> nn.Module:
    context = ModelContext(
        hf_config=SMALL | changes,
        dtype=torch.float32,
        device=torch.device(device),
        linear_method=TorchLinearMethod(),
        ops=TorchOps(),
        max_model_len=8,
        ranks=ranks,
    )
    return model_cls(context)


def make_v3(**changes: object) -> nn.Module:
    return make_model(DeepseekV3ForCausalLM, OneRank(), "meta", **changes)


def make_v2(**changes: object) -> nn.Module:
    return make_model(DeepseekV2ForCausalLM, OneRank(), "meta", **changes)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"q_lora_rank": 0}, ("q_lora_rank is 0",)),
        ({"kv_lora_rank": "many"}, ("kv_lora_rank", "'many'")),
        ({"kv_lora_rank": 2**20}, ("kv_lora_rank + qk_rope_head_dim is 1048580", "8192")),
        ({"qk_nope_head_dim": -1}, ("qk_nope_head_dim is -1",)),
        ({"qk_nope_head_dim": 10**6}, ("qk_nope_head_dim is 1000000", "8192")),
        ({"v_head_dim": 10**6}, ("v_head_dim is 1000000", "8192")),
        ({"qk_rope_head_dim": 3}, ("rotary_dim=3",)),
        ({"num_key_value_heads": 1}, ("num_key_value_heads is 1", "only 3 is supported")),
        ({"n_routed_experts": 1}, ("n_routed_experts is 1", "from 2")),
        ({"n_routed_experts": 10**6}, ("n_routed_experts is 1000000", "4096")),
        ({"num_experts_per_tok": 7}, ("num_experts_per_tok is 7", "6 experts")),
        ({"n_shared_experts": -1}, ("n_shared_experts is -1",)),
        ({"moe_intermediate_size": 0}, ("moe_intermediate_size is 0",)),
        ({"first_k_dense_replace": -1}, ("first_k_dense_replace is -1",)),
        ({"n_group": 4}, ("n_group is 4", "6 experts", "equal groups")),
        ({"n_group": 0}, ("n_group is 0",)),
        ({"topk_group": 4}, ("topk_group is 4 of 3 groups",)),
        ({"topk_group": 1, "num_experts_per_tok": 3}, ("topk_group is 1", "num_experts_per_tok 3")),
        ({"moe_layer_freq": 2}, ("moe_layer_freq is 2",)),
        ({"routed_scaling_factor": 0}, ("routed_scaling_factor is 0",)),
        ({"topk_method": "best"}, ("topk_method", "'best'")),
        ({"rope_parameters": YARN | {"factor": "big"}}, ("factor",)),
        ({"rope_parameters": YARN | {"factor": 4.0, "mscale_all_dim": -1}}, ("mscale_all_dim",)),
        ({"rope_parameters": YARN | {"factor": None, "mscale_all_dim": 1.0}}, ("factor",)),
    ],
)
@pytest.mark.parametrize("make", [make_v3, make_v2])
def test_the_error_for_an_invalid_config_value_names_its_field(make, changes, words):
    method = "group_limited_greedy" if make is make_v2 else None
    make(topk_method=method)
    with pytest.raises(ModelError) as failure:
        make(**{"topk_method": method} | changes)
    assert all(word in str(failure.value) for word in words), failure.value


@pytest.mark.parametrize(
    ("make", "changes", "word"),
    [
        (make_v3, {"scoring_func": "softmax"}, "scoring_func"),
        (make_v3, {"topk_method": "greedy"}, "topk_method"),
        (make_v3, {"n_group": 6}, "groups of at least 2"),
        (make_v3, {"num_nextn_predict_layers": 65}, "num_nextn_predict_layers is 65"),
        (make_v2, {"scoring_func": "sigmoid"}, "scoring_func"),
        (make_v2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (make_v2, {"rope_interleave": False}, "rope_interleave"),
        (make_v2, {"topk_method": "group_limited_greedy", "n_group": None}, "n_group is absent"),
        (make_v2, {"num_experts_per_tok": None}, "num_experts_per_tok is absent"),
    ],
)
def test_a_config_value_of_the_other_deepseek_version_is_rejected(make, changes, word):
    with pytest.raises(ModelError, match=word):
        make(**changes)


def test_the_first_layers_are_dense_and_the_others_have_experts_and_a_shared_expert():
    layers = make_v3(first_k_dense_replace=2, n_shared_experts=3).model.layers
    assert [type(layer.mlp) for layer in layers] == [GatedMLP, GatedMLP, SparseMLP]
    assert layers[2].mlp.shared_expert.down_proj.shape.in_features == 3 * 8
    assert layers[2].mlp.gate.e_score_correction_bias.shape == (6,)
    assert make_v2().model.layers[2].mlp.gate.e_score_correction_bias is None
    assert make_v3(n_shared_experts=0).model.layers[2].mlp.shared_expert is None


def test_attention_keys_consist_of_the_latent_and_the_rotary_features():
    _, attention = attention_layers(make_v3())[1]
    sizes = (attention.num_heads, attention.num_kv_heads, attention.head_size)
    assert sizes == (3, 1, 16) and attention.value_size == 12
    assert attention.scale == pytest.approx(11**-0.5)
    rope = YARN | {"factor": 8.0, "mscale_all_dim": 0.5}
    _, scaled = attention_layers(make_v3(rope_parameters=rope))[1]
    assert scaled.scale == pytest.approx(11**-0.5 * (0.05 * math.log(8) + 1) ** 2)


def test_ranks_shard_the_heads_but_not_the_latent_vectors():
    first, second = (
        make_model(DeepseekV3ForCausalLM, OneRank(rank=rank, size=2), "meta", num_attention_heads=4)
        for rank in range(2)
    )
    attention = first.model.layers[0].self_attn
    assert attention.k_b_proj.weight.shape == (2 * 7, 12)
    assert attention.v_b_proj.weight.shape == (2 * 5, 12)
    assert attention.qkv_a_proj.shape.part_sizes == (9, 16)
    assert attention.q_b_proj.shape.part_sizes == (2 * 11,)
    assert second.model.layers[0].self_attn.k_b_proj.shards["weight"].start == 14
    with pytest.raises(ConfigError, match="3 query heads"):
        make_model(DeepseekV3ForCausalLM, OneRank(size=2), "meta")


def load(model: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(weights, folder / "model.safetensors")
    SafetensorsLoader(WeightLoaderContext(model_dir=folder)).load(model)


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Return random weights of the small model, with transformers' names and layouts."""
    fields = SMALL | {"num_key_value_heads": 3, "pad_token_id": 0}
    ReferenceModel(DeepseekV3Config(**fields)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_multi_token_prediction_layers_are_not_loaded(tmp_path):
    weights = checkpoint(tmp_path)
    extra = {
        "model.layers.3.eh_proj.weight": torch.ones(2),
        "model.layers.3.enorm.weight": torch.ones(2),
    }
    load(make_model(DeepseekV3ForCausalLM, OneRank(), "cpu"), weights | extra, tmp_path)
    with pytest.raises(WeightError, match=r"model\.layers\.3\.e"):
        load(
            make_model(DeepseekV3ForCausalLM, OneRank(), "cpu", num_nextn_predict_layers=0),
            weights | extra,
            tmp_path,
        )
    with pytest.raises(WeightError, match=r"model\.layers\.4\.enorm"):
        further = {"model.layers.4.enorm.weight": torch.ones(2)}
        load(make_model(DeepseekV3ForCausalLM, OneRank(), "cpu"), weights | further, tmp_path)


def test_rotary_features_at_the_end_of_heads_are_loaded_as_halves(tmp_path):
    weights = checkpoint(tmp_path)
    model = make_model(DeepseekV3ForCausalLM, OneRank(), "cpu")
    load(model, weights, tmp_path)
    attention = model.model.layers[1].self_attn
    own = weights["model.layers.1.self_attn.q_b_proj.weight"].view(3, 11, 9)
    stored = attention.q_b_proj.weight.view(3, 11, 9)
    assert torch.equal(stored, own[:, [0, 1, 2, 3, 4, 5, 6, 7, 9, 8, 10]])
    own = weights["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"]
    assert torch.equal(attention.qkv_a_proj.weight[9:], own[[*range(12), 12, 14, 13, 15]])

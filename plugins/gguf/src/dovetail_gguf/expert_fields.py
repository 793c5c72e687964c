"""Metadata of mixture-of-experts architectures: fields of config.json, and checks of tensors.

Each `read_…` function changes the fields of config.json of one architecture.
Source: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/llama-model.cpp`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dovetail.errors import ModelError
from dovetail_gguf.metadata_fields import Fields

Config = dict[str, Any]

MAX_EXPERTS = 4096
"""The maximum number of experts of a layer. A larger number is treated as an error in the file."""
_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""
_SIZE = "expert_feed_forward_length"
_LLAMA4_CHUNK = 8192
"""The attention chunk size of all Llama 4 models. GGUF files do not state it."""
_NUM_EXPERTS_OF_MAVERICK = 128


@dataclass(frozen=True, kw_only=True)
class ExpertNames:
    """The names that an architecture uses for its experts in config.json and in the model.

    count, inner: the fields of config.json for the number of experts of a layer and for their
    intermediate size. router: the name of the router in the MLP of the model.
    """

    count: str = "num_experts"
    inner: str = "moe_intermediate_size"
    router: str = "gate"


def read_counts(fields: Fields, names: ExpertNames) -> Config:
    """Return the number of experts per layer and the number of experts per token."""
    num_experts = fields.integer("expert_count", minimum=2, maximum=MAX_EXPERTS)
    top_k = fields.integer("expert_used_count", minimum=1, maximum=num_experts)
    return {names.count: num_experts, "num_experts_per_tok": top_k}


def check_experts(fields: Fields, names: ExpertNames, config: Config) -> None:
    """Raise ModelError if a router is missing, or a tensor contradicts the stated expert sizes.

    With this check, a file cannot cause a model to be created that is larger than its tensors.
    """
    count, inner, hidden = config[names.count], config[names.inner], config["hidden_size"]
    shapes = {
        "ffn_gate_inp": (count, hidden),
        "ffn_gate_exps": (count, inner, hidden),
        "ffn_up_exps": (count, inner, hidden),
        "ffn_down_exps": (count, hidden, inner),
    }
    tensors, path = fields.file.tensors, fields.file.path
    step = config.get("interleave_moe_layer_step", 1)
    first = config.get("first_k_dense_replace", 0) + step - 1
    for layer in range(first, config["num_hidden_layers"], step):
        router = f"blk.{layer}.ffn_gate_inp.weight"
        if router not in tensors:
            raise ModelError(
                f"{path} has no router of layer {layer} ({router}), but {fields.name}.block_count "
                f"is {config['num_hidden_layers']}. The file is incomplete; download it again."
            )
        for leaf, shape in shapes.items():
            info = tensors.get(f"blk.{layer}.{leaf}.weight")
            if info is not None and info.shape != shape:
                raise ModelError(
                    f"{path}: {info.name} has the shape {list(info.shape)}, but the metadata "
                    f"({fields.name}.expert_count {count}, embedding_length {hidden}, length of an "
                    f"expert {inner}) require {list(shape)}."
                )


def read_qwen2_moe(fields: Fields, config: Config) -> None:
    """Read the fields of Qwen 2 with experts and a shared expert."""
    config["moe_intermediate_size"] = fields.integer(_SIZE, minimum=1)
    config["shared_expert_intermediate_size"] = fields.integer(
        "expert_shared_feed_forward_length", minimum=1
    )
    config["norm_topk_prob"] = fields.flag("expert_weights_norm", default=False)
    config["qkv_bias"] = fields.has("attn_q.bias")


def read_qwen3_moe(fields: Fields, config: Config) -> None:
    """Read the fields of Qwen 3 with experts."""
    config["moe_intermediate_size"] = fields.integer(_SIZE, minimum=1)
    config["norm_topk_prob"] = fields.flag("expert_weights_norm", default=True)


def read_olmoe(fields: Fields, config: Config) -> None:
    """Read the fields of OLMoE."""
    config["norm_topk_prob"] = fields.flag("expert_weights_norm", default=False)


def read_gpt_oss(fields: Fields, config: Config) -> None:
    """Read the fields of gpt-oss. Files do not state that YaRN has `truncate=False`."""
    config["intermediate_size"] = fields.integer(_SIZE, minimum=1)
    config["attention_bias"] = fields.has("attn_q.bias")
    config["rope_scaling"] = {"rope_type": "default"} | config.get("rope_scaling", {})
    config["rope_scaling"]["truncate"] = False


def read_llama4(fields: Fields, config: Config) -> None:
    """Read the fields of Llama 4.

    Only Maverick, which has 128 experts, has no norms of queries and keys.
    """
    config["intermediate_size_mlp"] = config["intermediate_size"]
    config["intermediate_size"] = fields.integer(_SIZE, minimum=1)
    config["interleave_moe_layer_step"] = fields.integer("interleave_moe_layer_step", minimum=1)
    config["use_qk_norm"] = config["num_local_experts"] != _NUM_EXPERTS_OF_MAVERICK
    config["attention_bias"] = fields.has("attn_q.bias")
    config["attention_chunk_size"] = fields.integer(
        "attention.sliding_window", default=_LLAMA4_CHUNK, minimum=1
    )


def read_deepseek(fields: Fields, config: Config) -> None:
    """Read the fields of DeepSeek V2, or V3 if the scores of experts are sigmoids.

    The head sizes are key_length_mla and value_length_mla if the file states them (key_length is
    then the size of a latent vector), otherwise key_length and value_length.
    """
    rotary_dim = fields.integer("rope.dimension_count", minimum=1)
    mla = "" if fields.get("attention.key_length_mla") is None else "_mla"
    head_size = fields.integer(f"attention.key_length{mla}", minimum=rotary_dim + 1)
    config |= {
        "num_key_value_heads": fields.integer("attention.head_count", minimum=1),
        "q_lora_rank": fields.integer("attention.q_lora_rank", default=0) or None,
        "kv_lora_rank": fields.integer("attention.kv_lora_rank", minimum=1),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": head_size - rotary_dim,
        "v_head_dim": fields.integer(f"attention.value_length{mla}", minimum=1),
        "first_k_dense_replace": fields.integer("leading_dense_block_count", default=0),
        "moe_intermediate_size": fields.integer(_SIZE, minimum=1),
        "n_shared_experts": fields.integer("expert_shared_count", default=0),
        "routed_scaling_factor": fields.number("expert_weights_scale", default=1.0),
        "norm_topk_prob": fields.flag("expert_weights_norm", default=False),
        "n_group": fields.integer("expert_group_count", default=1, minimum=1),
        "topk_group": fields.integer("expert_group_used_count", default=1, minimum=1),
    }
    del config["head_dim"]  # of transformers: the rotary features only
    gating = fields.integer(
        "expert_gating_func", default=_SOFTMAX, minimum=_SOFTMAX, maximum=_SIGMOID
    )
    if gating == _SIGMOID:
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    elif config["n_group"] > 1:
        config["topk_method"] = "group_limited_greedy"
    scaling = config.get("rope_scaling", {})
    if scaling.get("rope_type") == "yarn" and fields.get("rope.scaling.yarn_log_multiplier"):
        scale = fields.number("rope.scaling.yarn_log_multiplier") / 0.1
        scaling |= {"mscale": scale, "mscale_all_dim": scale}

"""The supported GGUF architectures: model class, config.json fields and tensor names of each.

Sources: https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/llama-model.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dovetail.errors import ModelError
from dovetail.interfaces import WeightMapping
from dovetail_gguf.expert_fields import (
    ExpertNames,
    read_deepseek,
    read_gpt_oss,
    read_llama4,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
)
from dovetail_gguf.metadata_fields import Fields
from dovetail_gguf.state_layers import (
    mamba2_mappings,
    qwen3_next_mappings,
    read_mamba2,
    read_qwen3_next,
)

Config = dict[str, Any]
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BRANCHES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF files.

    model_class: name of the model in config.json. windowed: this name for files with a sliding
    window. permutes_rotary: whether the converter permutes the rows of queries and keys, so that
    rotary features are in pairs. is_rotary_partial: whether only a part of each head rotates.
    eps: the field of config.json for the epsilon of norms; "rms_norm_eps" for RMS norms.
    norm_offset: what the converter adds to the weights of norms. fuses_gate: whether the tensor
    ffn_up contains gate and up. names: modules of a layer that differ from those of Llama, by the
    tensor's name. mappings: yields the mappings of tensors that differ from those of Llama in other
    ways. read: changes the fields of config.json. is_writable: whether `dovetail quantize` writes
    files of this architecture.
    experts: names of the experts; None for dense models. with_experts: the variant with experts, if
    files with and without experts state the same architecture name.
    """

    model_class: str
    model_type: str
    windowed: str = ""
    is_writable: bool = False
    permutes_rotary: bool = False
    is_rotary_partial: bool = False
    eps: str = "rms_norm_eps"
    activation: str = "silu"
    norm_offset: float = 0.0
    fuses_gate: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    mappings: Callable[[Mapping[str, Any]], Iterator[WeightMapping]] | None = None
    read: Callable[[Fields, Config], None] | None = None
    experts: ExpertNames | None = None
    with_experts: Architecture | None = None


def _read_gemma2(fields: Fields, config: Config) -> None:
    config["hidden_activation"] = config["hidden_act"]
    for name, default in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
        config[name] = fields.number(name, default=default)
    config["query_pre_attn_scalar"] = _scalar(config, layers_of_27b=46)


def _read_gemma3(fields: Fields, config: Config) -> None:
    config["hidden_activation"] = config["hidden_act"]
    config["query_pre_attn_scalar"] = _scalar(config, layers_of_27b=62)
    config["rope_theta"] = fields.number("rope.freq_base", default=1e6)
    config["rope_local_base_freq"] = fields.number("rope.freq_base_swa", default=1e4)


def _scalar(config: Config, *, layers_of_27b: int) -> int:
    """Return query_pre_attn_scalar: the head size, except in the models with 27B parameters."""
    if config["num_hidden_layers"] == layers_of_27b:
        return int(config["hidden_size"] // max(1, config["num_attention_heads"]))
    return int(config["head_dim"])


def _read_phi3(fields: Fields, config: Config) -> None:
    if not config.get("sliding_window"):
        config["sliding_window"] = None
    long, short = (fields.values(f"rope_factors_{kind}.weight") for kind in ("long", "short"))
    if not long:
        return
    length = fields.integer(
        "rope.scaling.original_context_length", default=config["max_position_embeddings"]
    )
    config["original_max_position_embeddings"] = length
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "long_factor": long,
        "short_factor": short,
        "original_max_position_embeddings": length,
    }
    if fields.get("rope.scaling.attn_factor") is not None:
        scale = fields.number("rope.scaling.attn_factor")
        config["rope_scaling"]["attention_factor"] = scale


def _read_gpt_neox(fields: Fields, config: Config) -> None:
    config["use_parallel_residual"] = fields.flag("use_parallel_residual", default=True)
    config["attention_bias"] = fields.has("attn_qkv.bias")


def _read_starcoder2(fields: Fields, config: Config) -> None:
    config["use_bias"] = fields.has("attn_q.bias")


def _read_stablelm(fields: Fields, config: Config) -> None:
    config["use_parallel_residual"] = not fields.has("ffn_norm.weight")
    config["use_qkv_bias"] = fields.has("attn_q.bias")
    if fields.has("attn_q_norm.weight"):
        raise ModelError(
            f"{fields.file.path}: norms of queries and keys (blk.0.attn_q_norm.weight) are not "
            "supported in GGUF files of stablelm. Load the original checkpoint."
        )


def _read_olmo(fields: Fields, config: Config) -> None:
    if fields.get("attention.clamp_kqv") is not None:
        config["clip_qkv"] = fields.number("attention.clamp_kqv")


def _read_granite(fields: Fields, config: Config) -> None:
    config["embedding_multiplier"] = fields.number("embedding_scale", default=1.0)
    config["residual_multiplier"] = fields.number("residual_scale", default=1.0)
    config["attention_multiplier"] = fields.number(
        "attention.scale", default=max(1, config["head_dim"]) ** -0.5
    )
    config["logits_scaling"] = fields.number("logit_scale", default=1.0)
    config["attention_bias"] = fields.has("attn_q.bias")
    config["mlp_bias"] = fields.has("ffn_gate.bias")


def _read_cohere(fields: Fields, config: Config) -> None:
    config["logit_scale"] = fields.number("logit_scale")
    config["use_qk_norm"] = fields.has("attn_q_norm.weight")


def _read_glm(fields: Fields, config: Config) -> None:
    config["attention_bias"] = fields.has("attn_q.bias")


def _read_falcon(fields: Fields, config: Config) -> None:
    has_two_norms = fields.has("attn_norm_2.weight")
    num_kv_heads = config["num_key_value_heads"]
    config["new_decoder_architecture"] = has_two_norms or num_kv_heads > 1
    config["num_kv_heads"] = num_kv_heads
    config["num_ln_in_parallel_attn"] = 2 if has_two_norms else 1
    config["ffn_hidden_size"] = config["intermediate_size"]
    del config["head_dim"]  # computed by transformers
    config["activation"] = "gelu"
    config["bias"] = fields.has("attn_qkv.bias")


def _read_mpt(fields: Fields, config: Config) -> None:
    slope = fields.number("attention.max_alibi_bias", default=8.0)
    section: Config = {"alibi_bias_max": int(slope) if slope.is_integer() else slope}
    if fields.get("attention.clamp_kqv") is not None:
        section["clip_qkv"] = fields.number("attention.clamp_kqv")
    config["attn_config"] = section
    config["expansion_ratio"] = config["intermediate_size"] // max(1, config["hidden_size"])


_GELU = "gelu_pytorch_tanh"
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_class="LlamaForCausalLM",
        model_type="llama",
        windowed="MistralForCausalLM",
        is_writable=True,
        permutes_rotary=True,
        with_experts=Architecture(
            model_class="MixtralForCausalLM",
            model_type="mixtral",
            is_writable=True,
            permutes_rotary=True,
            experts=ExpertNames(count="num_local_experts", inner="intermediate_size"),
        ),
    ),
    "mistral": Architecture(
        model_class="MistralForCausalLM",
        model_type="mistral",
        is_writable=True,
        permutes_rotary=True,
    ),
    "qwen2": Architecture(model_class="Qwen2ForCausalLM", model_type="qwen2", is_writable=True),
    "qwen3": Architecture(model_class="Qwen3ForCausalLM", model_type="qwen3", is_writable=True),
    "gemma": Architecture(
        model_class="GemmaForCausalLM",
        model_type="gemma",
        activation=_GELU,
        norm_offset=1.0,
    ),
    "gemma2": Architecture(
        model_class="Gemma2ForCausalLM",
        model_type="gemma2",
        activation=_GELU,
        norm_offset=1.0,
        names=_SANDWICH,
        read=_read_gemma2,
    ),
    "gemma3": Architecture(
        model_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        activation=_GELU,
        norm_offset=1.0,
        names=_SANDWICH,
        read=_read_gemma3,
    ),
    "phi2": Architecture(
        model_class="PhiForCausalLM",
        model_type="phi",
        is_rotary_partial=True,
        eps="layer_norm_eps",
        activation="gelu_new",
    ),
    "phi3": Architecture(
        model_class="Phi3ForCausalLM",
        model_type="phi3",
        is_rotary_partial=True,
        fuses_gate=True,
        read=_read_phi3,
    ),
    "gpt2": Architecture(
        model_class="GPT2LMHeadModel",
        model_type="gpt2",
        eps="layer_norm_epsilon",
        activation="gelu_new",
    ),
    "gptneox": Architecture(
        model_class="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        is_rotary_partial=True,
        eps="layer_norm_eps",
        activation="gelu",
        read=_read_gpt_neox,
    ),
    "starcoder2": Architecture(
        model_class="Starcoder2ForCausalLM",
        model_type="starcoder2",
        eps="norm_epsilon",
        activation=_GELU,
        read=_read_starcoder2,
    ),
    "stablelm": Architecture(
        model_class="StableLmForCausalLM",
        model_type="stablelm",
        is_rotary_partial=True,
        eps="layer_norm_eps",
        read=_read_stablelm,
    ),
    "olmo": Architecture(
        model_class="OlmoForCausalLM",
        model_type="olmo",
        permutes_rotary=True,
        eps="layer_norm_eps",
        read=_read_olmo,
    ),
    "olmo2": Architecture(
        model_class="Olmo2ForCausalLM",
        model_type="olmo2",
        windowed="Olmo3ForCausalLM",
        names=_BRANCHES,
    ),
    "granite": Architecture(
        model_class="GraniteForCausalLM",
        model_type="granite",
        permutes_rotary=True,
        read=_read_granite,
    ),
    "command-r": Architecture(
        model_class="CohereForCausalLM",
        model_type="cohere",
        permutes_rotary=True,
        eps="layer_norm_eps",
        read=_read_cohere,
    ),
    "cohere2": Architecture(
        model_class="Cohere2ForCausalLM",
        model_type="cohere2",
        permutes_rotary=True,
        eps="layer_norm_eps",
        read=_read_cohere,
    ),
    "glm4": Architecture(
        model_class="Glm4ForCausalLM",
        model_type="glm4",
        permutes_rotary=True,
        is_rotary_partial=True,
        fuses_gate=True,
        names=_SANDWICH,
        read=_read_glm,
    ),
    "chatglm": Architecture(
        model_class="GlmForCausalLM",
        model_type="glm",
        permutes_rotary=True,
        is_rotary_partial=True,
        fuses_gate=True,
        read=_read_glm,
    ),
    "smollm3": Architecture(
        model_class="SmolLM3ForCausalLM",
        model_type="smollm3",
        permutes_rotary=True,
    ),
    "falcon": Architecture(
        model_class="FalconForCausalLM",
        model_type="falcon",
        eps="layer_norm_epsilon",
        read=_read_falcon,
    ),
    "bloom": Architecture(
        model_class="BloomForCausalLM",
        model_type="bloom",
        eps="layer_norm_epsilon",
    ),
    "mpt": Architecture(
        model_class="MptForCausalLM",
        model_type="mpt",
        eps="layer_norm_epsilon",
        read=_read_mpt,
    ),
    "qwen2moe": Architecture(
        model_class="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        is_writable=True,
        experts=ExpertNames(),
        read=read_qwen2_moe,
    ),
    "qwen3moe": Architecture(
        model_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        is_writable=True,
        experts=ExpertNames(),
        read=read_qwen3_moe,
    ),
    "olmoe": Architecture(
        model_class="OlmoeForCausalLM",
        model_type="olmoe",
        experts=ExpertNames(inner="intermediate_size"),
        read=read_olmoe,
    ),
    "deepseek2": Architecture(
        model_class="DeepseekV2ForCausalLM",
        model_type="deepseek_v2",
        experts=ExpertNames(count="n_routed_experts"),
        read=read_deepseek,
    ),
    "gpt-oss": Architecture(
        model_class="GptOssForCausalLM",
        model_type="gpt_oss",
        names={"post_attention_norm": "post_attention_layernorm"},
        experts=ExpertNames(count="num_local_experts", inner="intermediate_size", router="router"),
        read=read_gpt_oss,
    ),
    "llama4": Architecture(
        model_class="Llama4ForCausalLM",
        model_type="llama4_text",
        permutes_rotary=True,
        experts=ExpertNames(count="num_local_experts", inner="intermediate_size", router="router"),
        read=read_llama4,
    ),
    "mamba2": Architecture(
        model_class="Mamba2ForCausalLM",
        model_type="mamba2",
        mappings=mamba2_mappings,
        read=read_mamba2,
    ),
    "qwen3next": Architecture(
        model_class="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        is_rotary_partial=True,
        norm_offset=1.0,
        names={"post_attention_norm": "post_attention_layernorm"},
        mappings=qwen3_next_mappings,
        experts=ExpertNames(),
        read=read_qwen3_next,
    ),
}

"""Small random checkpoints of every dense family, with reference logits computed by transformers.

Sizes are odd where the architecture allows it, and each variant of a family that has its own code
has a checkpoint. This module depends on transformers, not on the engine.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from parity.checkpoints import VOCAB_SIZE, Checkpoint
from parity.random_weights import fill
from parity.state_families import STATE_FAMILIES

_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.3 * i for i in range(6)],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 22,
    "kv_lora_rank": 26,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 256,
        "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_USUAL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """The checkpoint of a family. model, config: names of classes in transformers.

    fields: the whole config. max_len: the longest sequence for which transformers computes the same
    function. attention: its implementation of attention.
    """

    model: str
    config: str
    fields: Mapping[str, Any]
    max_len: int = 664
    attention: str = "eager"


def usual_family(prefix: str, *without: str, config: str = "", **fields: Any) -> Family:
    """Return a family whose config has the usual names. without: names that it does not have."""
    max_len = fields.pop("max_len", 664)
    attention = fields.pop("attention", "eager")
    usual = {name: value for name, value in _USUAL.items() if name not in without}
    return Family(
        model=f"{prefix}ForCausalLM",
        config=config or f"{prefix}Config",
        fields=usual | fields,
        max_len=max_len,
        attention=attention,
    )


FAMILIES: Mapping[str, Family] = {
    "mixtral": usual_family("Mixtral", num_local_experts=5, num_experts_per_tok=2),
    "mixtral, window": usual_family(
        "Mixtral", num_local_experts=3, num_experts_per_tok=1, sliding_window=37
    ),
    "qwen2_moe": usual_family(
        "Qwen2Moe",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        shared_expert_intermediate_size=34,
        use_sliding_window=True,
        sliding_window=37,
        max_window_layers=2,
    ),
    "qwen3_moe": usual_family(
        "Qwen3Moe",
        num_experts=7,
        num_experts_per_tok=4,
        moe_intermediate_size=26,
        norm_topk_prob=True,
        head_dim=20,
    ),
    "qwen3_moe, dense layers": usual_family(
        "Qwen3Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=26,
        mlp_only_layers=[0],
        attention_bias=True,
    ),
    "deepseek_v2": usual_family("DeepseekV2", **_LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2, lite": usual_family(
        "DeepseekV2", **_LATENT | {"q_lora_rank": None, "mlp_bias": True, "attention_bias": True}
    ),
    "deepseek_v3": usual_family("DeepseekV3", **_LATENT),
    "deepseek_v3, halves": usual_family(
        "DeepseekV3",
        **_LATENT
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "rope_parameters": _PLAIN_ROPE,
            "norm_topk_prob": False,
            "attention_bias": True,
            "n_shared_experts": 2,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "gpt_oss": usual_family(
        "GptOss",
        "hidden_act",
        num_local_experts=5,
        num_experts_per_tok=2,
        head_dim=20,
        sliding_window=37,
        swiglu_limit=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    ),
    "gpt_oss, plain": usual_family(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=1,
        layer_types=["full_attention"] * 3,
        attention_bias=False,
        rope_parameters=_PLAIN_ROPE,
    ),
    "llama4": usual_family(
        "Llama4",
        config="Llama4TextConfig",
        num_local_experts=5,
        intermediate_size_mlp=56,
        head_dim=20,
        moe_layers=[1, 2],
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=96,
        floor_scale=64,
        attn_scale=0.4,
    ),
    "llama4, two experts": usual_family(
        "Llama4",
        config="Llama4TextConfig",
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=56,
        head_dim=20,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        attention_bias=True,
        no_rope_layer_interval=3,
        attention_chunk_size=128,
    ),
    **{name: usual_family(*names, **fields) for name, (names, fields) in STATE_FAMILIES.items()},
    "olmoe": usual_family("Olmoe", num_experts=8, num_experts_per_tok=3, clip_qkv=1.5),
    "gemma": usual_family("Gemma", head_dim=20),
    "gemma2": usual_family(
        "Gemma2",
        head_dim=20,
        sliding_window=37,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": usual_family(
        "Gemma3",
        config="Gemma3TextConfig",
        head_dim=20,
        sliding_window=37,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,  # without effect
        final_logit_softcapping=5.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **_MIXED,
    ),
    "phi": usual_family("Phi"),
    "phi, qk norm": usual_family("Phi", qk_layernorm=True, num_key_value_heads=4),
    "phi3, window": usual_family("Phi3", sliding_window=37),
    "phi3, long rope, short": usual_family(
        "Phi3", hidden_size=64, original_max_position_embeddings=1024, rope_parameters=_LONG
    ),
    # Every sequence is longer than the original length, so that transformers uses long factors.
    "phi3, long rope, long": usual_family(
        "Phi3",
        hidden_size=64,
        original_max_position_embeddings=16,
        rope_parameters=_LONG | {"factor": 4.0},
    ),
    "gpt2": Family(
        model="GPT2LMHeadModel",
        config="GPT2Config",
        fields={
            "vocab_size": VOCAB_SIZE,
            "n_embd": 44,
            "n_head": 4,
            "n_layer": 3,
            "n_positions": 700,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "gpt_neox": usual_family("GPTNeoX", "num_key_value_heads", hidden_size=64),
    "gpt_neox, sequential": usual_family(
        "GPTNeoX", "num_key_value_heads", hidden_size=64, use_parallel_residual=False
    ),
    "opt": usual_family("OPT", "num_key_value_heads", "intermediate_size", ffn_dim=72),
    "opt, post-norm, projected": usual_family(
        "OPT",
        "num_key_value_heads",
        "intermediate_size",
        ffn_dim=72,
        do_layer_norm_before=False,
        word_embed_proj_dim=28,
    ),
    "starcoder2": usual_family("Starcoder2", sliding_window=37),
    "stablelm": usual_family("StableLm", hidden_size=64, use_qkv_bias=True),
    "stablelm, parallel, qk norm": usual_family(
        "StableLm", hidden_size=64, use_parallel_residual=True, qk_layernorm=True
    ),
    "olmo": usual_family("Olmo", clip_qkv=1.5),
    "olmo2": usual_family("Olmo2"),
    "olmo3": usual_family(
        "Olmo3",
        sliding_window=37,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 256,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        **_MIXED,
    ),
    "granite": usual_family(
        "Granite",
        embedding_multiplier=3.0,
        logits_scaling=1.7,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
    ),
    "granite, gelu": usual_family("Granite", hidden_act="gelu", tie_word_embeddings=True),
    "cohere": usual_family("Cohere", logit_scale=0.7),
    "cohere, qk norm": usual_family("Cohere", logit_scale=0.7, use_qk_norm=True),
    "cohere2": usual_family("Cohere2", logit_scale=0.7, sliding_window=37, **_MIXED),
    "glm": usual_family("Glm", head_dim=16),
    "glm4": usual_family("Glm4", head_dim=24),
    "smollm3": usual_family("SmolLM3", no_rope_layers=[1, 0, 1]),
    "falcon, 7b": usual_family("Falcon", "num_key_value_heads", "intermediate_size"),
    "falcon, 40b": usual_family(
        "Falcon",
        "num_key_value_heads",
        "intermediate_size",
        new_decoder_architecture=True,
        num_kv_heads=2,
        bias=True,
    ),
    "falcon, 11b": usual_family(
        "Falcon",
        "num_key_value_heads",
        "intermediate_size",
        new_decoder_architecture=True,
        num_kv_heads=2,
        num_ln_in_parallel_attn=1,
    ),
    # transformers rounds this bias to bfloat16, which is exact up to position 256 with such slopes.
    # Its eager attention adds the bias twice (5.23), so that the other one is the reference.
    "falcon, alibi": usual_family(
        "Falcon",
        "num_key_value_heads",
        "intermediate_size",
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
        max_len=256,
        attention="sdpa",
    ),
    "bloom": Family(
        model="BloomForCausalLM",
        config="BloomConfig",
        fields={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "n_head": 6,
            "n_layer": 3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mpt": Family(
        model="MptForCausalLM",
        config="MptConfig",
        fields={
            "vocab_size": VOCAB_SIZE,
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 1024,
            "attn_config": {"clip_qkv": 1.5},
        },
    ),
}


def make_family(name: str, folder: Path, seed: int) -> Checkpoint:
    """Create and save the checkpoint of a family. The weights depend on name and seed."""
    oracle = make_model(FAMILIES[name], name, seed)
    oracle.save_pretrained(folder)
    return Checkpoint(name=name, folder=folder, oracle=oracle)


def make_model(family: Family, name: str, seed: int) -> transformers.PreTrainedModel:
    """Return a transformers model with random weights, which depend on name and seed."""
    config_cls = getattr(transformers, family.config)
    config = config_cls(**family.fields, attn_implementation=family.attention)
    config._experts_implementation = "eager"  # the default needs multiples of 16 bytes
    model = getattr(transformers, family.model)(config).eval()
    fill(model, torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode())))
    return model

"""The rules of llama.cpp's converter for families with experts.

Rows are whole blocks of 32 values, so that the files may be quantized.
Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gguf.constants import MODEL_ARCH

from gguf_files.conversion import Conversion, changed
from parity.family_checkpoints import usual_family

SIZES = {"hidden_size": 64, "intermediate_size": 96}
INNER = {"moe_intermediate_size": 32}
_SCALE = 0.707
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
_YARN |= {"original_max_position_embeddings": 256}
_YARN_KEYS = {
    "rope.scaling.type": "!yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 256,
}
_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_LOCAL_COUNTS = _COUNTS | {"expert_count": "num_local_experts"}
_MOE_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
_LATENT = SIZES | {
    "moe_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 1.5,
    "rope_parameters": _YARN | {"mscale": _SCALE, "mscale_all_dim": _SCALE},
}
_LATENT_KEYS = {
    **_COUNTS,
    **_MOE_SIZE,
    **_YARN_KEYS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": 0.1 * _SCALE,
}
_OLD_SIZES = {"attention.key_length": 40, "attention.value_length": "v_head_dim"}
_MLA_SIZES = {
    "attention.head_count_kv": 1,
    "attention.key_length": 72,
    "attention.value_length": "kv_lora_rank",
    "attention.key_length_mla": 40,
    "attention.value_length_mla": "v_head_dim",
}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_V3_KEYS = _LATENT_KEYS | _GROUPS | {"expert_gating_func": 2}
_V3_KEYS |= {"expert_weights_norm": "norm_topk_prob"}


def _llama4(**fields: Any) -> Conversion:
    """Return Llama 4 with the constants of llama.cpp, which files do not state."""
    family = usual_family(
        "Llama4",
        config="Llama4TextConfig",
        head_dim=32,
        intermediate_size_mlp=128,
        attention_chunk_size=8192,
        num_hidden_layers=4,
        **SIZES,
        **fields,
    )
    return Conversion(
        architecture=MODEL_ARCH.LLAMA4,
        family=family,
        transposes_experts=True,
        keys=_LOCAL_COUNTS
        | {
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
    )


EXPERT_CONVERSIONS: Mapping[str, Conversion] = {
    "mixtral": Conversion(
        architecture=MODEL_ARCH.LLAMA,
        family=changed("mixtral", **SIZES),
        is_permuted=True,
        keys=_LOCAL_COUNTS,
    ),
    "qwen2moe": Conversion(
        architecture=MODEL_ARCH.QWEN2MOE,
        family=changed(
            "qwen2_moe",
            **SIZES,
            **INNER,
            shared_expert_intermediate_size=64,
            use_sliding_window=False,
        ),
        keys=_COUNTS
        | _MOE_SIZE
        | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3moe": Conversion(
        architecture=MODEL_ARCH.QWEN3MOE,
        family=changed("qwen3_moe", **SIZES, **INNER, head_dim=32),
        keys=_COUNTS | _MOE_SIZE,
    ),
    "olmoe": Conversion(
        architecture=MODEL_ARCH.OLMOE,
        family=changed("olmoe", **SIZES, clip_qkv=None),
        keys=_COUNTS,
    ),
    "deepseek2, v2": Conversion(
        architecture=MODEL_ARCH.DEEPSEEK2,
        family=changed("deepseek_v2", **_LATENT),
        splits_latent=True,
        keys=_LATENT_KEYS | _MLA_SIZES | _GROUPS,
    ),
    "deepseek2, v2 lite, old": Conversion(
        architecture=MODEL_ARCH.DEEPSEEK2,
        family=changed(
            "deepseek_v2, lite",
            **_LATENT
            | {
                "q_lora_rank": None,
                "mlp_bias": False,
                "attention_bias": False,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        keys=_LATENT_KEYS | _OLD_SIZES,
    ),
    "deepseek2, v3": Conversion(
        architecture=MODEL_ARCH.DEEPSEEK2,
        family=changed("deepseek_v3", **_LATENT, n_shared_experts=2),
        splits_latent=True,
        keys=_V3_KEYS | _MLA_SIZES,
    ),
    "deepseek2, v3, old": Conversion(
        architecture=MODEL_ARCH.DEEPSEEK2,
        family=changed("deepseek_v3", **_LATENT, first_k_dense_replace=2),
        keys=_V3_KEYS | _OLD_SIZES,
    ),
    "gpt-oss": Conversion(
        architecture=MODEL_ARCH.GPT_OSS,
        family=changed(
            "gpt_oss",
            **SIZES,
            head_dim=32,
            swiglu_limit=7.0,
            rope_parameters=_YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 2.0},
        ),
        experts="alternating",
        transposes_experts=True,
        keys=_LOCAL_COUNTS
        | _YARN_KEYS
        | {
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
        },
    ),
    "llama4": _llama4(
        num_local_experts=5,
        interleave_moe_layer_step=2,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama4, two experts": _llama4(num_local_experts=4, num_experts_per_tok=2),
}

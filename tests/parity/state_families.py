"""The fields of small checkpoints of families with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NO_ATTENTION = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_NEXT = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 34,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 18,
    "linear_value_head_dim": 14,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rms_norm_eps": 1e-3,  # limits the amplification of rounding errors (`random_weights.fill`)
}
_RECURRENT = {"intermediate_size": 148, "attention_window_size": 37, "logits_soft_cap": 5.0}
STATE_FAMILIES: Mapping[str, tuple[tuple[str, ...], Mapping[str, Any]]] = {
    "mamba2": (
        ("Mamba2", *_NO_ATTENTION),
        {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 20, "use_bias": True},
    ),
    "mamba2, limited steps": (
        ("Mamba2", *_NO_ATTENTION),
        {
            "num_heads": 4,
            "head_dim": 24,
            "n_groups": 1,
            "state_size": 9,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "time_step_limit": [0.2, 0.9],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": (("Qwen3Next",), _NEXT),
    "qwen3_next, dense layers": (
        ("Qwen3Next",),
        _NEXT
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [0, 2],
            "linear_num_key_heads": 4,
            "attention_bias": True,
            "norm_topk_prob": False,
        },
    ),
    "recurrent_gemma": (("RecurrentGemma",), _RECURRENT | {"lru_width": 52}),
    "recurrent_gemma, one kv head": (
        ("RecurrentGemma",),
        _RECURRENT
        | {
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "conv1d_width": 3,
            "block_types": ["attention", "recurrent"],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
            "tie_word_embeddings": False,
        },
    ),
}
"""Maps a name to the arguments of `usual_family`: the prefix with absent fields, and the fields."""

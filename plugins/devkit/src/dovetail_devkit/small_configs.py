"""Sizes of small models with recurrent layers, latent attention and experts.

They are arguments of configuration classes of the transformers library, such as `Mamba2Config`.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {"vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64}
MAMBA2 = COMMON | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}
QWEN3_NEXT = COMMON | {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
RECURRENT_GEMMA = COMMON | {
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "lru_width": 96,
    "attention_window_size": 48,
    "block_types": ["recurrent", "attention"],
    "tie_word_embeddings": False,
}
DEEPSEEK_V3 = COMMON | {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 512,
}

"""Small random checkpoints of architectures that only the fallback to transformers serves."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from parity.checkpoints import VOCAB_SIZE, Checkpoint
from parity.random_weights import fill

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPTIONAL = {
    "head_dim": 16,
    "sliding_window": 37,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
"""Values of fields that only some families have."""
_LATENT = {"num_key_value_heads": 4}
"""Latent attention has no groups."""
_DEFAULT_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

_PLAIN = """
afmoe apertus arcee aria_text beam biogpt bitnet cohere2_moe cwm dots1 ernie4_5 ernie4_5_moe
exaone4 exaone_moe flex_olmo flint glm4_moe gpt_bigcode granite_swa granitemoe
granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
jais2 jetmoe kolibri1 laguna mellum mimo_v2_flash minimax_m2 ministral ministral3 mixtral
modernbert-decoder nanochat nemotron olmoe persimmon qwen2_moe qwen3_moe seed_oss solar_open
vaultgemma
"""
_WITH_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")

SERVED: Mapping[str, Mapping[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    **{name: _LATENT for name in _WITH_LATENT},
    "gpt_oss": _DEFAULT_ROPE,
    "phimoe": {"sliding_window": None},
}
"""model_type, and fields of the config."""

ONE_RANK_ONLY = (
    "biogpt",
    "bitnet",
    "gpt_bigcode",
    "gpt_oss",
    "hunyuan_v1_dense",
    "jetmoe",
    "modernbert-decoder",
    "persimmon",
)
"""Architectures without a tensor-parallel plan for their layers."""

NATIVE = ("cohere", "gemma2", "glm4", "gpt_neox", "llama", "mistral", "olmo2", "phi3", "qwen2")
"""Architectures with a native model that have a plan."""

REJECTED: Mapping[str, Mapping[str, Any]] = {
    "bamba": {},
    "bart": {},
    "bloom": {},
    "codegen": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "vocab_size": 257},
    "diffllama": {},
    "falcon": {},
    "gpt_neo": {
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "vocab_size": VOCAB_SIZE,
    },
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 2, "rotary_dim": 8, "vocab_size": 257},
    "jamba": {},
    "llama4_text": {},
    "mamba": {},
    "mamba2": {"num_heads": 16, "head_dim": 8, "state_size": 16, "hidden_size": 64},
    "mpt": {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB_SIZE},
    "qwen3_next": {},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 72},
}
"""Architectures that would be computed incorrectly."""


def make_config(model_type: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json of a small model."""
    config_cls = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(config_cls.__init__).parameters)
    for base in config_cls.__mro__:
        known |= inspect.get_annotations(base).keys()
    optional = {name: value for name, value in _OPTIONAL.items() if name in known}
    has_sizes = "d_model" not in changes and "n_embd" not in changes and "num_layers" not in changes
    sizes = _SIZES if has_sizes else {}
    config = config_cls(**{**sizes, **(optional if has_sizes else {}), **changes})
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return {**config.to_dict(), "architectures": [architecture]}


def make_fallback(model_type: str, folder: Path, seed: int) -> Checkpoint:
    """Create and save the checkpoint of an architecture."""
    fields = make_config(model_type, SERVED.get(model_type, {}))
    config = CONFIG_MAPPING[model_type].from_dict(fields)
    model_cls = getattr(transformers, fields["architectures"][0])
    oracle = model_cls._from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    fill(oracle, torch.Generator().manual_seed(seed ^ zlib.crc32(model_type.encode())))
    oracle.save_pretrained(folder)
    return Checkpoint(name=model_type, folder=folder, oracle=oracle)

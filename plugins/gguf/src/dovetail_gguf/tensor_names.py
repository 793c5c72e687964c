"""Maps the names of tensors in GGUF files to the names of weights in models.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import re

IGNORED = frozenset({"rope_freqs.weight"})
"""Tensors whose content is part of the configuration."""

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(?P<number>\d{1,6})\.(?P<name>\w+)\.(?P<leaf>weight|bias)")
_OTHER = re.compile(r"(?P<name>\w+)\.(?P<leaf>weight|bias)")


def to_model_name(name: str) -> str:
    """Return the model's name for a tensor. An unknown name is returned unchanged."""
    if (match := _LAYER.fullmatch(name)) and match["name"] in _OF_LAYER:
        return f"model.layers.{match['number']}.{_OF_LAYER[match['name']]}.{match['leaf']}"
    if (match := _OTHER.fullmatch(name)) and match["name"] in _WHOLE:
        return f"{_WHOLE[match['name']]}.{match['leaf']}"
    return name


_FILE_NAMES = {model: own for own, model in _WHOLE.items()}
_FILE_NAMES_OF_LAYER = {model: own for own, model in _OF_LAYER.items()}
_MODEL_LAYER = re.compile(r"model\.layers\.(?P<number>\d{1,6})\.(?P<name>.+)\.(?P<leaf>\w+)")


def to_file_name(name: str) -> str:
    """Return the name in a file of a model's tensor. Raise KeyError for an unknown one."""
    if match := _MODEL_LAYER.fullmatch(name):
        own = _FILE_NAMES_OF_LAYER[match["name"]]
        return f"blk.{match['number']}.{own}.{match['leaf']}"
    module, _, leaf = name.rpartition(".")
    return f"{_FILE_NAMES[module]}.{leaf}"

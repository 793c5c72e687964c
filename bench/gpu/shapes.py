"""Writes model shapes without weights: a directory with a config.json, for the `dummy` loader."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_TINY: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
SHAPES: dict[str, dict[str, Any]] = {
    "one-layer": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 250,
        "tie_word_embeddings": True,
        "head_dim": 32,
        "max_position_embeddings": 1024,
    },
    "tiny": _TINY,
    "tiny-deep": {**_TINY, "num_hidden_layers": 5},
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
}
"""The sizes in the published config.json of Qwen3-0.6B and Qwen3-8B. The other shapes are not those
of real models."""


def write_shape(name: str, folder: Path) -> Path:
    """Write the config.json of a shape into a new directory below `folder`. Return its path."""
    path = folder / name
    path.mkdir(parents=True)
    config = {**_COMMON, **SHAPES[name]}
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return path


def num_weight_bytes(name: str) -> int:
    """Return the bytes of the matrices of a shape in bf16, without norms."""
    shape = SHAPES[name]
    tables = shape["vocab_size"] * shape["hidden_size"] * (2 - shape["tie_word_embeddings"])
    return _num_layer_bytes(shape) + 2 * tables


def num_read_bytes(name: str) -> int:
    """Return the bytes of weights that a step reads, which excludes the embedding table."""
    shape = SHAPES[name]
    return _num_layer_bytes(shape) + 2 * shape["vocab_size"] * shape["hidden_size"]


def num_layer_bytes(name: str) -> int:
    """Return the bytes of the matrices of one layer in bf16."""
    shape = SHAPES[name]
    return _num_layer_bytes(shape) // int(shape["num_hidden_layers"])


def _num_layer_bytes(shape: Mapping[str, Any]) -> int:
    """Return the bytes of the matrices of all layers in bf16."""
    hidden, head_dim = shape["hidden_size"], shape.get("head_dim", _COMMON["head_dim"])
    heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = hidden * head_dim * heads + 3 * hidden * shape["intermediate_size"]
    return 2 * int(shape["num_hidden_layers"] * layer)

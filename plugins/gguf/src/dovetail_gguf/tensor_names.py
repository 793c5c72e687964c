"""Maps the names of tensors in GGUF files to the names of weights in models.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from dovetail.interfaces import WeightMapping
from dovetail_gguf.architectures import Architecture

IGNORED_MODULES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
IGNORED = frozenset(f"{name}.weight" for name in IGNORED_MODULES)
"""Tensors whose content is part of the configuration."""
_ROTATED = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")
"""Tensors whose features a file may have in rotary pairs."""

_WHOLE = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "position_embd": "model.embed_positions",
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


def tensor_mappings(
    architecture: Architecture, config: Mapping[str, Any], names: Collection[str]
) -> list[WeightMapping]:
    """Return the mappings of the tensors of a file to the modules of the model.

    config: the fields of config.json that the file states. names: of the file's tensors.
    """
    modules = {**_OF_LAYER, **architecture.names}
    if "blk.0.attn_norm_2.weight" in names:  # Falcon 40B: the norm of attention is the second one
        modules |= {"attn_norm_2": "input_layernorm", "attn_norm": "post_attention_layernorm"}
    targets = {own: (f"model.layers.{{}}.{module}",) for own, module in modules.items()}
    targets["attn_qkv"] = tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv")
    if architecture.fuses_gate:
        targets["ffn_up"] = tuple(f"model.layers.{{}}.mlp.{part}_proj" for part in ("gate", "up"))
    pairs: dict[str, tuple[int, int]] = {}
    if architecture.permutes_rotary:
        del targets["attn_qkv"]  # v is not permuted
        size = config["head_dim"]
        rotary_size = int(size * config.get("partial_rotary_factor", 1.0))
        pairs = dict.fromkeys(_ROTATED, (size, rotary_size))
    return [
        *(WeightMapping(source=name) for name in IGNORED_MODULES),
        *(WeightMapping(source=own, targets=(module,)) for own, module in _WHOLE.items()),
        *(
            WeightMapping(
                source=f"blk.{{}}.{own}", targets=target, rotary_pairs=pairs.get(own, (0, 0))
            )
            for own, target in targets.items()
        ),
    ]


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

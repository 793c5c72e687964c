"""Maps the names of tensors in GGUF files to the names of weights in models.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from dovetail.interfaces import WeightMapping
from dovetail_gguf.architectures import Architecture
from dovetail_gguf.expert_fields import ExpertNames

IGNORED_MODULES = ("rope_freqs", "rope_factors_long", "rope_factors_short")
IGNORED = frozenset(f"{name}.weight" for name in IGNORED_MODULES)
"""Tensors whose content is part of the configuration."""
_SINKS = "blk.{}.attn_sinks.weight"
_ROTATED = ("attn_q", "attn_k", "attn_q_norm", "attn_k_norm")
"""Tensors whose rows the converter may permute, so that rotary features are in pairs."""

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
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""Tensors that contain the weights or the biases of all experts of a layer."""
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

    config: the fields of config.json that the file states. names: the names of the file's tensors.
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
        rotary_dim = int(size * config.get("partial_rotary_factor", 1.0))
        pairs = dict.fromkeys(_ROTATED, (size, rotary_dim))
    return [
        *(architecture.mappings(config) if architecture.mappings else ()),
        *(_latent_mappings(config) if "kv_lora_rank" in config else ()),
        *(WeightMapping(source=name) for name in IGNORED_MODULES),
        WeightMapping(source=_SINKS, targets=("model.layers.{}.self_attn.attn.sinks",)),
        *(WeightMapping(source=own, targets=(module,)) for own, module in _WHOLE.items()),
        *(
            WeightMapping(
                source=f"blk.{{}}.{own}", targets=target, rotary_pairs=pairs.get(own, (0, 0))
            )
            for own, target in targets.items()
        ),
        *(_expert_mappings(architecture.experts, config) if architecture.experts else ()),
    ]


def _expert_mappings(names: ExpertNames, config: Mapping[str, Any]) -> Iterator[WeightMapping]:
    """Yield the mappings of the router and of the experts of a layer."""
    mlp, num_experts = "model.layers.{}.mlp", config[names.count]
    yield WeightMapping(source="blk.{}.ffn_gate_inp", targets=(f"{mlp}.{names.router}",))
    yield WeightMapping(
        source="blk.{}.exp_probs_b.bias",
        targets=(f"{mlp}.{names.router}.e_score_correction_bias",),
    )
    for own, part in _EXPERTS.items():
        targets = tuple(f"{mlp}.experts.{expert}.{part}" for expert in range(num_experts))
        yield WeightMapping(source=f"blk.{{}}.{own}", targets=targets, stacked=num_experts)


def _latent_mappings(config: Mapping[str, Any]) -> Iterator[WeightMapping]:
    """Yield the mappings of multi-head latent attention, with kv_b or separate k_b and v_b."""
    attention, num_heads = "model.layers.{}.self_attn", config["num_attention_heads"]
    keys, values = f"{attention}.k_b_proj", f"{attention}.v_b_proj"
    rotary_dim, rank = config["qk_rope_head_dim"], config["kv_lora_rank"]
    head_size = config["qk_nope_head_dim"] + rotary_dim
    for own, module, size in (
        ("attn_q", "q_proj", head_size),
        ("attn_q_b", "q_b_proj", head_size),
        ("attn_kv_a_mqa", "kv_a_proj_with_mqa", rank + rotary_dim),
    ):
        yield WeightMapping(
            source=f"blk.{{}}.{own}",
            targets=(f"{attention}.{module}",),
            rotary_pairs=(size, rotary_dim),
            rotary_last=True,
        )
    for own, module in (
        ("attn_q_a", "q_a_proj"),
        ("attn_q_a_norm", "q_a_layernorm"),
        ("attn_kv_a_norm", "kv_a_layernorm"),
    ):
        yield WeightMapping(source=f"blk.{{}}.{own}", targets=(f"{attention}.{module}",))
    yield WeightMapping(source="blk.{}.attn_kv_b", targets=(keys, values), groups=num_heads)
    yield WeightMapping(
        source="blk.{}.attn_k_b", targets=(keys,), stacked=num_heads, transposed=True
    )
    yield WeightMapping(source="blk.{}.attn_v_b", targets=(values,), stacked=num_heads)


_FILE_NAMES = {model: own for own, model in _WHOLE.items()}
_FILE_NAMES_OF_LAYER = {
    **{model: own for own, model in _OF_LAYER.items()},
    **{f"mlp.experts.{part}": own for own, part in _EXPERTS.items()},
    "mlp.gate": "ffn_gate_inp",
}
_MODEL_LAYER = re.compile(r"model\.layers\.(?P<number>\d{1,6})\.(?P<name>.+)\.(?P<leaf>\w+)")


def to_file_name(name: str) -> str:
    """Return the name in files of a model's tensor. Raise KeyError for an unknown tensor."""
    if match := _MODEL_LAYER.fullmatch(name):
        own = _FILE_NAMES_OF_LAYER[match["name"]]
        return f"blk.{match['number']}.{own}.{match['leaf']}"
    module, _, leaf = name.rpartition(".")
    return f"{_FILE_NAMES[module]}.{leaf}"

"""The metadata of a GGUF file for a model: the inverse of `dovetail_gguf.model_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from dovetail.config.model_directory import ModelDirectory, eos_token_ids
from dovetail.errors import ConfigError, ModelError
from dovetail_gguf.architectures import ARCHITECTURES, Architecture
from dovetail_torch.layers import HeadShape
from dovetail_torch.layers.rope_frequencies import rope_frequencies

_EXPERT_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ORIGINAL = "original_max_position_embeddings"
_EPS = 1e-6
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mixtral": {"rms_norm_eps": 1e-5, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    "qwen3_moe": {
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
}
"""The engine's values of fields that config.json may omit, by model_type. `check_round_trip` raises
an error if a value is not that of the engine."""


def _writable() -> dict[str, tuple[str, Architecture]]:
    """Return the name in files and the row of each writable architecture, by model_type."""
    rows = [
        (name, row)
        for name, dense in ARCHITECTURES.items()
        for row in (dense, dense.with_experts)
        if row is not None and row.is_writable
    ]
    return {row.model_type: (name, row) for name, row in rows}


def architecture_of(config: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return the name of a model's architecture in GGUF files, and its row in `ARCHITECTURES`."""
    return _writable()[config["model_type"]]


def check_representable(original: ModelDirectory, method: str) -> None:
    """Raise ModelError if a GGUF file cannot describe the model, except for its shape.

    method: the quantization method. Raises ConfigError if the model has experts and the method does
    not support them.
    """
    config = original.config
    model_type = str(config.get("model_type"))
    writable = _writable()
    _, row = writable.get(model_type, ("", None))
    architecture = config["architectures"][0]
    if row is None or architecture not in (row.model_class, row.windowed):
        supported = ", ".join(row.model_class for _, row in writable.values())
        raise ModelError(
            f"The architecture {architecture} with model_type {model_type[:80]!r} cannot be "
            f"quantized. Supported: {supported}."
        )
    if row.experts is not None:
        _check_experts(config, method)
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"A model with hidden_act={config['hidden_act']!r} cannot be quantized.")
    if not config.get("max_position_embeddings"):
        raise ModelError(
            "A model without max_position_embeddings in config.json cannot be quantized: a GGUF "
            "file must state this length."
        )
    if original.path.is_dir():
        _sorted_eos_tokens(original)


def _check_experts(config: Mapping[str, Any], method: str) -> None:
    if method == "awq":
        raise ConfigError(
            "--method=awq does not support models with experts. Use --method=gptq or rtn."
        )
    for field, default in (("mlp_only_layers", []), ("decoder_sparse_step", 1)):
        value = config.get(field) or default
        if value != default:
            raise ModelError(
                f"A model with {field}={str(value)[:80]} cannot be quantized: a GGUF file has "
                "experts in every layer."
            )


def permuted_heads(config: Mapping[str, Any], heads: HeadShape) -> dict[str, int]:
    """Return the number of heads of each projection whose rows a GGUF file permutes, by name."""
    if not architecture_of(config)[1].permutes_rotary:
        return {}
    return {"self_attn.q_proj": heads.num_heads, "self_attn.k_proj": heads.num_kv_heads}


def add_metadata(writer: GGUFWriter, config: Mapping[str, Any], shape: Any) -> None:
    """Add the configuration. shape: the decoder's shape; see `read_shape`.

    Raises ModelError for a rope type that a GGUF file cannot describe.
    """
    name, row = architecture_of(config)
    head_size = shape.heads.head_size
    integers = {
        "embedding_length": shape.hidden_size,
        "feed_forward_length": shape.intermediate_size,
        "block_count": shape.num_layers,
        "attention.head_count": shape.heads.num_heads,
        "attention.head_count_kv": shape.heads.num_kv_heads,
        "attention.key_length": head_size,
        "attention.value_length": head_size,
        "attention.sliding_window": max(shape.windows),
        "rope.dimension_count": head_size,
        "context_length": config["max_position_embeddings"],
    }
    for key, value in integers.items():
        if value:
            writer.add_uint32(f"{name}.{key}", value)
    writer.add_float32(
        f"{name}.attention.layer_norm_rms_epsilon", _value(config, "rms_norm_eps") or _EPS
    )
    _add_rope(writer, name, config, shape.ropes[0].parameters)
    if row.experts is not None:
        _add_experts(writer, name, config, shape.num_experts)
    writer.add_quantization_version(2)


def _add_rope(
    writer: GGUFWriter, name: str, config: Mapping[str, Any], rope: Mapping[str, Any]
) -> None:
    """Add the rotary parameters, except those of llama3; see `rope_divisors`."""
    kind = rope["rope_type"]
    if kind not in _ROPE_TYPES:
        raise ModelError(
            f"A model with rope_scaling of the type {kind!r} cannot be quantized yet. Supported: "
            f"{', '.join(_ROPE_TYPES)}."
        )
    writer.add_float32(f"{name}.rope.freq_base", rope["rope_theta"])
    if kind in ("default", "llama3"):
        return
    writer.add_string(f"{name}.rope.scaling.type", kind)
    factor = rope.get("factor") or rope["max_position_embeddings"] / rope[_ORIGINAL]
    writer.add_float32(f"{name}.rope.scaling.factor", factor)
    tables = (config, config.get("rope_scaling") or config.get("rope_parameters") or {})
    original = next((table[_ORIGINAL] for table in tables if table.get(_ORIGINAL)), None)
    if original:
        writer.add_uint32(f"{name}.rope.scaling.original_context_length", original)
    for field in ("beta_fast", "beta_slow"):
        if kind == "yarn" and rope.get(field):
            writer.add_float32(f"{name}.rope.scaling.yarn_{field}", rope[field])


def rope_divisors(shape: Any) -> torch.Tensor | None:
    """Return what the frequencies of a llama3 model are divided by, float32 [head size / 2]."""
    rope = shape.ropes[0]
    if rope.parameters["rope_type"] != "llama3":
        return None
    usual_F, _ = rope_frequencies({**rope.parameters, "rope_type": "default"}, rope.rotary_dim)
    return usual_F / rope_frequencies(rope.parameters, rope.rotary_dim)[0]


def _add_experts(
    writer: GGUFWriter, name: str, config: Mapping[str, Any], num_experts: int
) -> None:
    writer.add_uint32(f"{name}.expert_count", num_experts)
    writer.add_uint32(f"{name}.expert_used_count", _value(config, "num_experts_per_tok"))
    for field, key in _EXPERT_SIZES.items():
        if size := _value(config, field):
            writer.add_uint32(f"{name}.{key}", size)
    renormalizes = _value(config, "norm_topk_prob")
    if renormalizes is not None:
        writer.add_bool(f"{name}.expert_weights_norm", renormalizes)


def shared_expert_size(config: Mapping[str, Any]) -> int:
    """Return the intermediate size of the shared expert; 0 if there is none."""
    size: int = _value(config, "shared_expert_intermediate_size") or 0
    return size


def _value(config: Mapping[str, Any], field: str) -> Any:
    """Return a field, or the engine's default if it is absent or null."""
    value = config.get(field)
    return _DEFAULTS.get(config["model_type"], {}).get(field) if value is None else value


def add_tokenizer(writer: GGUFWriter, original: ModelDirectory) -> None:
    """Add the tokenizer of a GGUF file, or the end-of-sequence tokens of a directory."""
    if original.path.is_file():
        _copy_tokenizer(writer, original.path)
        return
    for key, token_id in zip(_EOS_KEYS, _sorted_eos_tokens(original), strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}", token_id)


def _sorted_eos_tokens(original: ModelDirectory) -> list[int]:
    """Return the end-of-sequence tokens. Raise ModelError if there are more than 3."""
    ids = sorted(eos_token_ids(original.config, original.generation_config))
    if len(ids) > len(_EOS_KEYS):
        raise ModelError(
            f"The model has {len(ids)} end-of-sequence tokens; a GGUF file can store at most 3."
        )
    return ids


def _copy_tokenizer(writer: GGUFWriter, source: Path) -> None:
    for name, field in GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item)

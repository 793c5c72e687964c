"""The metadata of a GGUF file for a model: the inverse of `dovetail_gguf.model_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from dovetail.config.model_directory import eos_token_ids
from dovetail.errors import ModelError
from dovetail_gguf.architectures import ARCHITECTURES

_INTEGERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCALINGS = ("linear", "yarn")


def check_representable(config: Mapping[str, Any]) -> None:
    """Raise ModelError if a GGUF file cannot describe the model."""
    model_type = config.get("model_type")
    row = ARCHITECTURES.get(str(model_type))
    architecture = config["architectures"][0]
    is_writable = row is not None and row.is_writable
    if not is_writable or architecture not in (row.model_class, row.windowed):
        rows = (row for row in ARCHITECTURES.values() if row.is_writable)
        supported = ", ".join(row.model_class for row in rows)
        raise ModelError(
            f"The architecture {architecture} with model_type {str(model_type)[:80]!r} cannot be "
            f"quantized. Supported: {supported}."
        )
    scaling = _scaling(config)
    if scaling and scaling.get("rope_type") not in _SCALINGS:
        raise ModelError(
            f"A model with rope_scaling of the type {scaling.get('rope_type')!r} cannot be "
            f"quantized yet. Supported: none, {', '.join(_SCALINGS)}."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"A model with hidden_act={config['hidden_act']!r} cannot be quantized.")


def permuted_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of heads of the projections whose rows the file permutes."""
    if not ARCHITECTURES[config["model_type"]].permutes_rotary:
        return {}
    return {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": _complete(config)["num_key_value_heads"],
    }


def add_metadata(writer: GGUFWriter, source: Path, config: Mapping[str, Any]) -> None:
    """Add the configuration, and the tokenizer if `source` is a GGUF file."""
    name = config["model_type"]
    complete = _complete(config)
    for field, key in _INTEGERS.items():
        if complete.get(field):
            writer.add_uint32(f"{name}.{key}", complete[field])
    writer.add_uint32(f"{name}.attention.value_length", complete["head_dim"])
    writer.add_uint32(f"{name}.rope.dimension_count", complete["head_dim"])
    writer.add_float32(f"{name}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{name}.rope.freq_base", _theta(config))
    scaling = _scaling(config)
    if scaling:
        writer.add_string(f"{name}.rope.scaling.type", scaling["rope_type"])
        writer.add_float32(f"{name}.rope.scaling.factor", scaling["factor"])
        original = scaling.get("original_max_position_embeddings")
        if original:
            writer.add_uint32(f"{name}.rope.scaling.original_context_length", original)
    writer.add_quantization_version(2)
    if source.is_file():
        _copy_tokenizer(writer, source)


def add_eos_tokens(
    writer: GGUFWriter, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> None:
    """Add the end-of-sequence tokens of a directory. Raises ModelError if there are more than 3."""
    ids = sorted(eos_token_ids(config, generation_config))
    if len(ids) > len(_EOS_KEYS):
        raise ModelError(f"The model has {len(ids)} end-of-sequence tokens; at most 3 are stored.")
    for key, token_id in zip(_EOS_KEYS, ids, strict=False):
        writer.add_uint32(f"tokenizer.ggml.{key}", token_id)


def _copy_tokenizer(writer: GGUFWriter, source: Path) -> None:
    for name, field in GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            item = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], item)


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return {
        **config,
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "sliding_window": window,
    }


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters, which newer configurations keep in one object."""
    return config.get("rope_parameters") or {}


def _theta(config: Mapping[str, Any]) -> float:
    return float(config.get("rope_theta") or _parameters(config).get("rope_theta") or 10000.0)


def _scaling(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = dict(config.get("rope_scaling") or _parameters(config))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {} if kind == "default" else {**scaling, "rope_type": kind}

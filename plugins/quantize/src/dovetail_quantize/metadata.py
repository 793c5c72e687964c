"""The metadata of a GGUF file for a model: the inverse of `dovetail_gguf.model_config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

from dovetail.config.model_directory import eos_token_ids
from dovetail.errors import ConfigError, ModelError
from dovetail_gguf.architectures import ARCHITECTURES, Architecture
from dovetail_gguf.expert_fields import ExpertNames

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
_EXPERT_SIZES = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCALINGS = ("linear", "yarn")


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


def check_representable(config: Mapping[str, Any], method: str) -> None:
    """Raise ModelError if a GGUF file cannot describe the model.

    method: the quantization method. Raises ConfigError if the model has experts and the method does
    not support them.
    """
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
    scaling = _scaling(config)
    if scaling and scaling.get("rope_type") not in _SCALINGS:
        raise ModelError(
            f"A model with rope_scaling of the type {scaling.get('rope_type')!r} cannot be "
            f"quantized yet. Supported: none, {', '.join(_SCALINGS)}."
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelError(f"A model with hidden_act={config['hidden_act']!r} cannot be quantized.")


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


def permuted_heads(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of heads of each projection whose rows a GGUF file permutes, by name."""
    if not architecture_of(config)[1].permutes_rotary:
        return {}
    return {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": _complete(config)["num_key_value_heads"],
    }


def add_metadata(writer: GGUFWriter, source: Path, config: Mapping[str, Any]) -> None:
    """Add the configuration, and the tokenizer if `source` is a GGUF file."""
    name, row = architecture_of(config)
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
    if row.experts is not None:
        _add_experts(writer, name, row.experts, config)
    writer.add_quantization_version(2)
    if source.is_file():
        _copy_tokenizer(writer, source)


def _add_experts(
    writer: GGUFWriter, name: str, names: ExpertNames, config: Mapping[str, Any]
) -> None:
    counts = (names.count, "num_experts", "num_local_experts")
    writer.add_uint32(f"{name}.expert_count", next(config[x] for x in counts if x in config))
    writer.add_uint32(f"{name}.expert_used_count", config["num_experts_per_tok"])
    for field, key in _EXPERT_SIZES.items():
        if field in config:
            writer.add_uint32(f"{name}.{key}", config[field])
    if "norm_topk_prob" in config:
        writer.add_bool(f"{name}.expert_weights_norm", config["norm_topk_prob"])


def add_eos_tokens(
    writer: GGUFWriter, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> None:
    """Add the end-of-sequence tokens of a directory. Raises ModelError if there are more than 3."""
    ids = sorted(eos_token_ids(config, generation_config))
    if len(ids) > len(_EOS_KEYS):
        raise ModelError(
            f"The model has {len(ids)} end-of-sequence tokens; a GGUF file can store at most 3."
        )
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

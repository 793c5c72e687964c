"""Converts the metadata of a GGUF file to the fields of config.json.

Each supported architecture has a row in `ARCHITECTURES`. Metadata is untrusted: `Fields` checks the
type and range of every value.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import ModelError, nearest
from dovetail_gguf.architectures import ARCHITECTURES, Architecture
from dovetail_gguf.encoders.architecture_names import ENCODER_NAMES
from dovetail_gguf.encoders.configuration import read_encoder
from dovetail_gguf.encoders.pooling import read_pooling as read_pooling_of
from dovetail_gguf.expert_fields import check_experts, read_counts
from dovetail_gguf.metadata_fields import Fields
from dovetail_gguf.reader import GGUFFile
from dovetail_gguf.shape_checks import check_rotary_size, check_shapes

ROPE_FACTORS = "rope_freqs.weight"
"""Name of the tensor by whose values Llama 3.1 and later divide the rotary frequencies."""

_WINDOWED_TYPES = {"MistralForCausalLM": "mistral", "Olmo3ForCausalLM": "olmo3"}
"""The model_type of files with a sliding window, by architecture."""
_LLAMA3_LENGTH = 8192
_LLAMA3_LOW = 1.0
_LLAMA3_HIGH = {"Llama 3": 4.0, "Llama 4": 1.0}


def read_architecture(file: GGUFFile) -> str:
    """Return the name of a file's architecture. Raise ModelError for an unsupported one."""
    name = file.metadata.get("general.architecture")
    supported = (*ARCHITECTURES, *ENCODER_NAMES)
    if not isinstance(name, str) or name not in supported:
        raise ModelError(
            f"{file.path} has the architecture {name!r:.80}, which is not supported.\n"
            f"Supported: {', '.join(supported)}.{nearest(str(name)[:80], supported)}"
        )
    return name


def read_pooling(file: GGUFFile) -> str | None:
    """Return how the model pools. See `ModelDescription`."""
    return read_pooling_of(Fields(file, read_architecture(file)))


def get_architecture(file: GGUFFile) -> tuple[str, Architecture]:
    """Return the name of a decoder's architecture, and its row in `ARCHITECTURES`.

    If an architecture has a separate row for files with experts, it is used for such files.
    Raises ModelError for an encoder, and for an architecture that is not supported.
    """
    name = read_architecture(file)
    if name in ENCODER_NAMES:
        raise ModelError(f"{file.path} has the architecture {name}, which is that of an encoder.")
    row = ARCHITECTURES[name]
    if row.experts is None and Fields(file, name).integer("expert_count", default=0):
        if row.with_experts is None:
            raise ModelError(
                f"{file.path}: {name} with experts ({name}.expert_count) is not supported. Load "
                "the original checkpoint."
            )
        row = row.with_experts
    return name, row


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of config.json. An invalid value raises a ModelError with file and key."""
    encoder = read_architecture(file)
    if encoder in ENCODER_NAMES:
        return read_encoder(Fields(file, encoder))
    name, row = get_architecture(file)
    fields = Fields(file, name)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = _head_dim(fields, row, hidden // max(1, heads))
    window = fields.integer("attention.sliding_window", default=0)
    is_windowed = bool(window and row.windowed)
    eps_key = "rms_epsilon" if row.eps == "rms_norm_eps" else "epsilon"
    config: dict[str, Any] = {
        "architectures": [row.windowed if is_windowed else row.model_class],
        "model_type": _WINDOWED_TYPES[row.windowed] if is_windowed else row.model_type,
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", default=heads),
        "head_dim": head_dim,
        "hidden_act": row.activation,
        row.eps: fields.number(f"attention.layer_norm_{eps_key}"),
        "rope_theta": fields.number("rope.freq_base", default=10000.0),
        "max_position_embeddings": fields.integer("context_length"),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": "bfloat16",
    }
    if row.model_type in ("llama", "mistral", "qwen3", "qwen3_moe"):
        config["attention_bias"] = fields.has("attn_q.bias")
        config["mlp_bias"] = fields.has("ffn_gate.bias")
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True}
    elif row.model_type == "mistral":
        config["sliding_window"] = None  # without the field, the window has 4,096 tokens
    scaling = _rope_scaling(fields, head_dim, config)
    if scaling:
        config["rope_scaling"] = scaling
    if row.is_rotary_partial:
        size = fields.integer("rope.dimension_count", default=head_dim)
        config["partial_rotary_factor"] = size / head_dim if head_dim else 1.0
    if row.experts is not None:
        config |= read_counts(fields, row.experts)
    if row.read is not None:
        row.read(fields, config)
    if row.experts is not None:
        check_experts(fields, row.experts, config)
    if "kv_lora_rank" not in config:
        check_rotary_size(fields, head_dim, is_partial=row.is_rotary_partial)
    check_shapes(fields, config, head_dim)
    return config


def _head_dim(fields: Fields, row: Architecture, default: int) -> int:
    """Return the head size. In files of Llama, rope.dimension_count may state it."""
    if not row.is_rotary_partial:
        default = fields.integer("rope.dimension_count", default=default)
    return fields.integer("attention.key_length", default=default)


def read_generation_config(file: GGUFFile) -> dict[str, Any]:
    """Return a generation config with the end-of-sequence ids: EOS, end of turn, end of message."""
    ids = []
    for key in ("eos_token_id", "eot_token_id", "eom_token_id"):
        value = file.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < _vocab_size(file):
            raise ModelError(f"{file.path}: tokenizer.ggml.{key} is {value!r:.80}, not a token id.")
        ids.append(value)
    return {"eos_token_id": sorted(set(ids))} if ids else {}


def _vocab_size(file: GGUFFile) -> int:
    """Return the number of rows of the embedding, which may exceed the number of tokens."""
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ModelError(f"{file.path} has no token embedding (token_embd.weight).")
    return table.shape[0]


def _rope_scaling(fields: Fields, head_dim: int, config: Mapping[str, Any]) -> dict[str, Any]:
    if ROPE_FACTORS in fields.file.tensors:
        return _llama3_scaling(fields.file, head_dim, config["rope_theta"])
    kind = fields.get("rope.scaling.type")
    if kind in (None, "none"):
        # Files without a type have linear scaling if they state a factor.
        keys = () if kind == "none" else ("rope.scaling.factor", "rope.scale_linear")
        stated = next((key for key in keys if fields.get(key) is not None), None)
        factor = 1.0 if stated is None else fields.number(stated)
        return {} if factor == 1 else {"rope_type": "linear", "factor": factor}
    if kind not in ("linear", "yarn"):
        raise ModelError(
            f"{fields.file.path}: {fields.name}.rope.scaling.type is {kind!r:.80}, which is not "
            "supported. Supported: none, linear, yarn."
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    original = fields.integer("rope.scaling.original_context_length", default=0)
    if original:
        scaling["original_max_position_embeddings"] = original
    for field in ("beta_fast", "beta_slow"):
        if kind == "yarn" and fields.get(f"rope.scaling.yarn_{field}") is not None:
            scaling[field] = fields.number(f"rope.scaling.yarn_{field}")
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the Llama 3 RoPE parameters after comparing them with all stored divisors."""
    info = file.tensors[ROPE_FACTORS]
    if info.type.name != "F32" or info.shape != (head_dim // 2,):
        raise ModelError(
            f"{file.path}: {ROPE_FACTORS} has the shape {list(info.shape)} and the type "
            f"{info.type.name}; expected {head_dim // 2} values of F32."
        )
    stated = [value for (value,) in struct.iter_unpack("<f", file.data(ROPE_FACTORS))]
    factor = float(f"{max(stated):.6g}")
    turns = [
        _LLAMA3_LENGTH * theta ** (-2 * index / head_dim) / (2 * math.pi)
        for index in range(len(stated))
    ]
    differences = []
    for model, high in _LLAMA3_HIGH.items():
        expected = [_llama3_divisor(value, factor, high) for value in turns]
        difference = _first_difference(stated, expected)
        if difference is None:
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_LENGTH,
            }
        differences.append(f"those of {model} (number {difference})")
    raise ModelError(
        f"{file.path}: the divisors in {ROPE_FACTORS} differ from {' and '.join(differences)}. "
        "Other divisors are not supported."
    )


def _llama3_divisor(turns: float, factor: float, high: float) -> float:
    """Return the divisor of a frequency. turns: rotations over the original length."""
    if factor <= 0:
        return math.nan
    if high == _LLAMA3_LOW:  # a step instead of a ramp
        return 1.0 if turns >= high else factor
    keep = min(1.0, max(0.0, (turns - _LLAMA3_LOW) / (high - _LLAMA3_LOW)))
    return 1 / ((1 - keep) / factor + keep)


def _first_difference(stated: Sequence[float], expected: Sequence[float]) -> str | None:
    for index, (value, usual) in enumerate(zip(stated, expected, strict=True)):
        if not math.isclose(value, usual, rel_tol=1e-3):
            return f"{index} is {value:g}, expected {usual:g}"
    return None

"""Converts the metadata of an encoder to the fields of config.json.

The converter removes the rows of the position table before the first position, so the tables of
RoBERTa and XLM-R are those of BERT. Metadata is untrusted: sizes are compared with the tensors.
Source: https://github.com/ggml-org/llama.cpp, `conversion/bert.py` and `src/models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dovetail.errors import ModelError
from dovetail.value_checks import shorten
from dovetail_gguf.encoders.architecture_names import BERT, MODERN_BERT, NOMIC_BERT
from dovetail_gguf.encoders.pooling import CLS, HEAD, read_pooling_type
from dovetail_gguf.metadata_fields import Fields
from dovetail_gguf.shape_checks import check_rotary_size, check_shapes

Config = dict[str, Any]

_DENSE, _HEAD_NORM = "cls.weight", "cls.norm.weight"
_DISTIL_NAMES = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
}
"""The names of fields of DistilBERT."""
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_PERIOD = 3
"""Every third layer of ModernBERT has full attention."""
_LOCAL_THETA = 10_000.0
_ACTIVATIONS = ("gelu", "silu")
"""The activations of ModernBERT; the first one if a file states none."""


def read_encoder(fields: Fields) -> Config:
    """Return the fields of config.json. An invalid value raises a ModelError with file and key."""
    config = _read_sizes(fields)
    config |= _READERS[fields.name](fields, config)
    if HEAD in fields.file.tensors:
        config |= _read_labels(fields, config)
    return config


def has_head(fields: Fields) -> bool:
    """Return whether the model in the file classifies."""
    return HEAD in fields.file.tensors


def _read_sizes(fields: Fields) -> Config:
    hidden = fields.integer("embedding_length", minimum=1)
    num_heads = fields.integer("attention.head_count", minimum=1)
    num_layers = fields.integer("block_count", minimum=1)
    num_kv_heads = fields.integer("attention.head_count_kv", default=num_heads)
    if hidden % num_heads or num_kv_heads != num_heads:
        raise ModelError(
            f"{fields.file.path}: {fields.name}.attention.head_count is {num_heads}; it must be a "
            f"divisor of {fields.name}.embedding_length ({hidden}), and equal to "
            f"{fields.name}.attention.head_count_kv ({num_kv_heads})."
        )
    if fields.flag("attention.causal", default=False):
        raise ModelError(
            f"{fields.file.path}: {fields.name}.attention.causal is true; an encoder attends to "
            "all tokens."
        )
    vocab_size, _ = _shape(fields, "token_embd.weight")
    if fields.integer("vocab_size", default=vocab_size) > vocab_size:
        raise ModelError(
            f"{fields.file.path}: {fields.name}.vocab_size is {fields.get('vocab_size')}, but "
            f"token_embd.weight has only {vocab_size} rows."
        )
    has_blocks = any(not info.type.is_plain for info in fields.file.tensors.values())
    config = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length", minimum=1),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "max_position_embeddings": fields.integer("context_length", minimum=1),
        "vocab_size": vocab_size,
        "tie_word_embeddings": True,
        # Kernels compute with quantized blocks in bfloat16 only.
        "dtype": "bfloat16" if has_blocks else "float32",
    }
    check_shapes(fields, config, hidden // num_heads)
    for layer in range(num_layers):  # at most the number of tensors, which `check_shapes` compares
        for leaf in ("attn_output", "ffn_down"):
            _shape(fields, f"blk.{layer}.{leaf}.weight")
    return config


def _read_bert(fields: Fields, config: Config) -> Config:
    num_positions, columns = _shape(fields, "position_embd.weight")
    length = config["max_position_embeddings"]
    if (num_positions, columns) != (length, config["hidden_size"]):
        raise ModelError(
            f"{fields.file.path}: position_embd.weight has the shape {[num_positions, columns]}, "
            f"but the metadata ({fields.name}.context_length, embedding_length) require "
            f"{[length, config['hidden_size']]}."
        )
    if has_head(fields) != (_DENSE in fields.file.tensors):
        absent = _DENSE if has_head(fields) else HEAD
        raise ModelError(
            f"{fields.file.path}: the classification head lacks {absent}. llama.cpp's converter "
            "omits one layer of the head of BERT, so the results would be wrong. Load the original "
            "checkpoint."
        )
    num_types = _num_types(fields, config)
    family = "Bert" if num_types else "DistilBert"
    kind = "ForSequenceClassification" if has_head(fields) else "Model"
    changes = {
        "architectures": [f"{family}{kind}"],
        "model_type": family.lower(),
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
    }
    if num_types:
        return {**changes, "hidden_act": "gelu", "type_vocab_size": num_types}
    return {
        **changes,
        "activation": "gelu",
        **{own: config[usual] for own, usual in _DISTIL_NAMES.items()},
    }


def _read_nomic_bert(fields: Fields, config: Config) -> Config:
    if has_head(fields):
        raise ModelError(
            f"{fields.file.path}: the classification head ({HEAD}) is not supported for "
            f"{fields.name}."
        )
    _check_rope(fields, config)
    return {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "hidden_act": "silu",
        "layer_norm_eps": fields.number("attention.layer_norm_epsilon"),
        "type_vocab_size": _num_types(fields, config),
        "rope_theta": fields.number("rope.freq_base"),
    }


def _read_modern_bert(fields: Fields, config: Config) -> Config:
    tensors = fields.file.tensors
    _check_rope(fields, config)
    head = {}
    if has_head(fields):
        absent = next((name for name in (_DENSE, _HEAD_NORM) if name not in tensors), None)
        if absent:
            raise ModelError(f"{fields.file.path}: the classification head lacks {absent}.")
        # Files of classifiers do not state the pooling. As in llama.cpp, it is the mean.
        pooling = "cls" if read_pooling_type(fields) == CLS else "mean"
        head = {"classifier_pooling": pooling, "classifier_bias": "cls.bias" in tensors}
    kind = "ModernBertForSequenceClassification" if has_head(fields) else "ModernBertModel"
    return {
        "architectures": [kind],
        "model_type": "modernbert",
        "hidden_activation": _read_activation(fields),
        "norm_eps": fields.number("attention.layer_norm_epsilon"),
        "norm_bias": "output_norm.bias" in tensors,
        "attention_bias": fields.has("attn_qkv.bias"),
        "mlp_bias": fields.has("ffn_up.bias"),
        "global_rope_theta": fields.number("rope.freq_base"),
        "local_rope_theta": fields.number("rope.freq_base_swa", default=_LOCAL_THETA),
        **_read_windows(fields, config["num_hidden_layers"]),
        **head,
    }


def _check_rope(fields: Fields, config: Config) -> None:
    """Raise ModelError for scaled positions, and for another rotary size than the head size."""
    scaling = fields.get("rope.scaling.type")
    if scaling is None and fields.number("rope.scaling.factor", default=1.0) != 1:
        scaling = "linear"  # as in llama.cpp
    if scaling not in (None, "none"):
        raise ModelError(
            f"{fields.file.path}: {fields.name}.rope.scaling.type is {shorten(scaling)}; only "
            "'none' is supported."
        )
    head_size = config["hidden_size"] // config["num_attention_heads"]
    check_rotary_size(fields, head_size, is_partial=False)


def _read_activation(fields: Fields) -> str:
    value = fields.get("hidden_activation")
    if value is not None and value not in _ACTIVATIONS:
        raise ModelError(
            f"{fields.file.path}: {fields.name}.hidden_activation is {shorten(value)}; it must be "
            f"one of {', '.join(_ACTIVATIONS)}."
        )
    return value or _ACTIVATIONS[0]


def _read_windows(fields: Fields, num_layers: int) -> Config:
    """Return the window of ModernBERT, and which layers have it."""
    window = fields.integer("attention.sliding_window", default=0)
    if not window:
        return {"layer_types": [_GLOBAL] * num_layers}
    pattern = fields.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        period = fields.integer("attention.sliding_window_pattern", default=_PERIOD, minimum=1)
        pattern = [layer % period != 0 for layer in range(num_layers)]
    if len(pattern) != num_layers or not all(type(item) in (bool, int) for item in pattern):
        raise ModelError(
            f"{fields.file.path}: {fields.name}.attention.sliding_window_pattern must be a number "
            f"or a list of {num_layers} flags."
        )
    kinds = [_LOCAL if is_local else _GLOBAL for is_local in pattern]
    return {"local_attention": window, "layer_types": kinds}


def _read_labels(fields: Fields, config: Config) -> Config:
    """Return the labels of the classification head, and their number."""
    num_labels = _num_rows(fields, HEAD, config)
    key = f"{fields.name}.classifier.output_labels"
    metadata = fields.file.metadata
    if key not in metadata:
        return {"num_labels": num_labels}
    if metadata.count(key) != num_labels:
        raise ModelError(
            f"{fields.file.path}: {key} has {metadata.count(key) or 'no'} labels, but {HEAD} has "
            f"{num_labels} rows."
        )
    labels = metadata[key]
    if not all(isinstance(label, str) for label in labels):
        raise ModelError(f"{fields.file.path}: {key} has {shorten(labels[0])}, not a string.")
    return {
        "num_labels": num_labels,
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }


def _num_types(fields: Fields, config: Config) -> int:
    """Return the number of token types; 0 for DistilBERT, which has none."""
    name = "token_types.weight"
    is_distil = fields.name == BERT and name not in fields.file.tensors
    num_types = 0 if is_distil else _num_rows(fields, name, config)
    # Files of DistilBERT state one type.
    num_stated = max(1, num_types)
    stated = fields.file.metadata.get("tokenizer.ggml.token_type_count", num_stated)
    if stated != num_stated:
        raise ModelError(
            f"{fields.file.path}: tokenizer.ggml.token_type_count is {shorten(stated)}, but "
            f"{name} has {num_types} rows."
        )
    return num_types


def _num_rows(fields: Fields, name: str, config: Config) -> int:
    """Return the rows of a tensor, whose columns are those of the hidden size."""
    rows, columns = _shape(fields, name)
    if columns != config["hidden_size"]:
        raise ModelError(
            f"{fields.file.path}: {name} has the shape {[rows, columns]}, but the metadata "
            f"({fields.name}.embedding_length) require {config['hidden_size']} columns."
        )
    return rows


def _shape(fields: Fields, name: str) -> tuple[int, int]:
    """Return rows and columns of a tensor. Raise ModelError if it is missing.

    Files may omit the number of rows of a tensor with one row.
    """
    info = fields.file.tensors.get(name)
    if info is None or len(info.shape) > 2:
        description = "no tensor" if info is None else f"the shape {list(info.shape)} of the tensor"
        raise ModelError(f"{fields.file.path} has {description} {name}; it must be a matrix.")
    return (1, *info.shape) if len(info.shape) == 1 else info.shape  # type: ignore[return-value]


_READERS: Mapping[str, Callable[[Fields, Config], Config]] = {
    BERT: _read_bert,
    MODERN_BERT: _read_modern_bert,
    NOMIC_BERT: _read_nomic_bert,
}

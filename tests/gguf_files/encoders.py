"""Writes encoders of transformers to GGUF files, by the rules of llama.cpp's converter.

Names of tensors come from the gguf package. The rules are independent of the engine's reader.
Source: https://github.com/ggml-org/llama.cpp/blob/master/conversion/bert.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, PoolingType, get_tensor_name_map
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
from gguf.quants import dequantize, quantize

from gguf_files.vocabularies import finish

PREFIXES = ("bert.", "roberta.", "distilbert.", "nomic_bert.", "model.")
OMITTED = ("pooler.", "cls.", "vocab_", "lm_head.")
BLOCK = 32
Q4_K_BYTES = 144
"""Bytes of a block of 256 values: two float16 scales, and codes."""


@dataclass(frozen=True, kw_only=True)
class EncoderConversion:
    """The rules for one encoder. model: the class of transformers. fields: of its config.

    offset: rows of the position table before the first position. keys: metadata by name without the
    architecture, computed from the config.
    """

    architecture: MODEL_ARCH
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    offset: int = 0
    keys: Callable[[Any], Mapping[str, Any]] = lambda config: {}


def _modern_keys(config: Any) -> Mapping[str, Any]:
    return {
        "attention.layer_norm_epsilon": config.norm_eps,
        "attention.sliding_window": config.local_attention,
        "attention.sliding_window_pattern": 3,
        "rope.freq_base": 160000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.scaling.type": "none",
        "vocab_size": config.vocab_size,
    }


def _nomic_keys(config: Any) -> Mapping[str, Any]:
    return {"rope.freq_base": float(config.rope_parameters["rope_theta"])}


_MODERN = {
    "local_attention": 24,
    "num_hidden_layers": 4,
    "classifier_pooling": "mean",
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
_DISTIL = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}
ROBERTA = {"type_vocab_size": 1, "pad_token_id": 1}
_BERT = MODEL_ARCH.BERT
ENCODER_CONVERSIONS: Mapping[str, EncoderConversion] = {
    "bert": EncoderConversion(architecture=_BERT, model="BertModel"),
    "distilbert": EncoderConversion(architecture=_BERT, model="DistilBertModel", fields=_DISTIL),
    "roberta": EncoderConversion(
        architecture=_BERT, model="RobertaModel", fields=ROBERTA, offset=2
    ),
    "xlm-roberta": EncoderConversion(
        architecture=_BERT, model="XLMRobertaModel", fields=ROBERTA, offset=2
    ),
    "modern-bert": EncoderConversion(
        architecture=MODEL_ARCH.MODERN_BERT,
        model="ModernBertModel",
        fields=_MODERN,
        keys=_modern_keys,
    ),
    "nomic-bert": EncoderConversion(
        architecture=MODEL_ARCH.NOMIC_BERT, model="NomicBertModel", keys=_nomic_keys
    ),
}
CLASSIFIER_CONVERSIONS: Mapping[str, EncoderConversion] = {
    "distilbert": EncoderConversion(
        architecture=_BERT, model="DistilBertForSequenceClassification", fields=_DISTIL
    ),
    "roberta": EncoderConversion(
        architecture=_BERT, model="RobertaForSequenceClassification", fields=ROBERTA, offset=2
    ),
    "xlm-roberta": EncoderConversion(
        architecture=_BERT, model="XLMRobertaForSequenceClassification", fields=ROBERTA, offset=2
    ),
    "modern-bert": EncoderConversion(
        architecture=MODEL_ARCH.MODERN_BERT,
        model="ModernBertForSequenceClassification",
        fields=_MODERN,
        keys=_modern_keys,
    ),
}
BERT_CLASSIFIER = EncoderConversion(architecture=_BERT, model="BertForSequenceClassification")
"""The converter omits its pooler."""


def write_encoder(
    conversion: EncoderConversion,
    model: torch.nn.Module,
    path: Path,
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    keys: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    vocabulary: Callable[[GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write a transformers model to the GGUF file `path`. type_: the type of matrices.

    The matrices of `model` are rounded to this type, so that it stays the reference. keys: metadata
    that replaces or adds keys, without the architecture; None omits one. change: changes the
    tensors, by their names in the file. vocabulary: adds the vocabulary.
    """
    config = model.config
    name = MODEL_ARCH_NAMES[conversion.architecture]
    writer = GGUFWriter(path, name)
    stated = _usual_keys(conversion, config) | dict(conversion.keys(config)) | dict(keys or {})
    for key, value in stated.items():
        if value is not None:
            _add(writer, key if key.startswith("tokenizer.") else f"{name}.{key}", value)
    vocabulary(writer)
    tensors = dict(_tensors(conversion, model, type_))
    change(tensors)
    for stored, values in tensors.items():
        writer.add_tensor(stored, *_stored(values, type_, is_rounded(stored, values.shape)))
    finish(writer)
    return path


def is_rounded(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the type of matrices. name: in the file."""
    kept = ("position_embd", "token_types")  # always F32
    return len(shape) == 2 and shape[1] % BLOCK == 0 and not name.startswith(kept)


def round_matrix(values: np.ndarray, type_: GGMLQuantizationType) -> np.ndarray:
    """Return values that the type can represent. Those of Q4_K are random."""
    if type_ == GGMLQuantizationType.F16:
        return values.astype(np.float16).astype(np.float32)
    if type_ == GGMLQuantizationType.Q4_K:
        return dequantize(_random_blocks(values), type_).reshape(values.shape)
    return dequantize(quantize(values, type_), type_)


def _random_blocks(values: np.ndarray) -> np.ndarray:
    """Return blocks of Q4_K of the size of `values`; equal sizes give equal blocks."""
    chance = np.random.default_rng(values.size)
    blocks = chance.integers(0, 256, (values.size // 256, Q4_K_BYTES), np.uint8)
    blocks[:, :2] = np.array([2e-4], np.float16).view(np.uint8)
    blocks[:, 2:4] = np.array([1.5e-3], np.float16).view(np.uint8)
    return blocks


def _stored(
    values: np.ndarray, type_: GGMLQuantizationType, rounded: bool
) -> tuple[np.ndarray, tuple[int, ...] | None, GGMLQuantizationType]:
    if not rounded:
        return values.astype(np.float32), None, GGMLQuantizationType.F32
    if type_ == GGMLQuantizationType.Q4_K:
        rows = _random_blocks(values).reshape(values.shape[0], -1)
        return rows, None, type_
    return quantize(values, type_), None, type_


def _usual_keys(conversion: EncoderConversion, config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings - conversion.offset,
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": getattr(config, "intermediate_size", None) or config.hidden_dim,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": getattr(config, "layer_norm_eps", 1e-12),
        "attention.causal": False,
        "tokenizer.ggml.token_type_count": getattr(config, "type_vocab_size", None),
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    kinds |= {str: writer.add_string, list: writer.add_array}
    kinds[PoolingType] = lambda key, value: writer.add_uint32(key, value.value)
    kinds[type(value)](key, value)


@torch.no_grad()
def _tensors(
    conversion: EncoderConversion, model: torch.nn.Module, type_: GGMLQuantizationType
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and values in the file. Round the parameters of `model`."""
    names = get_tensor_name_map(conversion.architecture, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        is_kept = any(part in name for part in ("position_emb", "token_type", "pooler"))
        if not is_kept and type_ != GGMLQuantizationType.F32 and is_rounded(name, parameter.shape):
            parameter.copy_(torch.from_numpy(round_matrix(parameter.numpy().copy(), type_)))
    for name, values in _by_converter_names(conversion, model):
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        yield stored, np.ascontiguousarray(values)


def _by_converter_names(
    conversion: EncoderConversion, model: torch.nn.Module
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of the file by the names that the converter reads."""
    parameters = {}
    for own, parameter in model.named_parameters():
        name = own
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        parameters[name] = parameter.detach().numpy()
    for name, values in parameters.items():
        if name.startswith(OMITTED):
            continue
        if "position_embeddings" in name:
            values = values[conversion.offset :]
        if conversion.architecture == MODEL_ARCH.NOMIC_BERT:
            yield from _nomic(parameters, name, values)
            continue
        leaf = name.rpartition(".")[2]
        if name in ("classifier.weight", "classifier.bias"):
            name = f"classifier.out_proj.{leaf}"
        yield name, values


_NOMIC = {
    "embeddings.LayerNorm": "emb_ln",
    "self_attn.o_proj": "attn.out_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


def _nomic(
    parameters: Mapping[str, np.ndarray], name: str, values: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a tensor by the name of published checkpoints; q, k and v become one tensor."""
    for new, old in _NOMIC.items():
        name = name.replace(new, old)
    name = f"encoder.{name}" if name.startswith("layers.") else name
    if "q_proj" in name:
        own = name.removeprefix("encoder.")
        parts = [parameters[own.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        yield name.replace("self_attn.q_proj", "attn.Wqkv"), np.concatenate(parts)
    elif "k_proj" not in name and "v_proj" not in name:
        yield name, values

"""Checks that a GGUF file with the metadata of a model describes the same model.

Dimensions: F half of the head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FunctionType
from typing import Any

import numpy as np
from gguf import GGUFWriter

from dovetail.config.checkpoint_facts import stated_max_model_len
from dovetail.errors import ConfigError, ModelError
from dovetail.plugins import PluginRegistry
from dovetail.value_checks import shorten
from dovetail_gguf.model_config import ROPE_FACTORS, read_config
from dovetail_gguf.reader import GGUFFile
from dovetail_quantize.metadata import (
    add_metadata,
    architecture_of,
    rope_divisors,
    shared_expert_size,
)
from dovetail_torch.layers.rope_frequencies import rope_frequencies

_TOLERANCE = 1e-6
"""The largest relative difference of numbers. A GGUF file stores them as float32."""
_Facts = dict[str, tuple[object, object]]
"""Values to compare and their descriptions, by field."""


def read_shape(config: Mapping[str, Any]) -> Any:
    """Return the shape of a decoder, as the engine reads it from the fields of config.json.

    Raises ModelError for a model class of a plugin that does not describe its shape.
    """
    architecture = config["architectures"][0]
    model_cls = PluginRegistry().load("model", architecture)
    if not hasattr(model_cls, "read_shape"):
        raise ModelError(
            f"{architecture} cannot be quantized: its class {model_cls.__qualname__} has no "
            "`read_shape`, which the description of the written file is compared with."
        )
    return model_cls.read_shape(config)


def check_round_trip(config: Mapping[str, Any]) -> None:
    """Raise ModelError, naming the first different field, if a GGUF file describes another model.

    Raises ConfigError if the temporary file for this check cannot be written.
    """
    shape = read_shape(config)
    stated = _facts(config, shape)
    again = read_back(config, shape)
    read = _facts(again, read_shape(again))
    for field in stated | read:
        (value, text), (other, other_text) = (
            facts.get(field, (None, None)) for facts in (stated, read)
        )
        if not _is_same(value, other):
            raise ModelError(
                f"The model cannot be quantized, because a GGUF file cannot describe it: {field} "
                f"is {shorten(text)}, but {shorten(other_text)} in the file."
            )


def read_back(config: Mapping[str, Any], shape: Any) -> dict[str, Any]:
    """Return the fields of config.json that a GGUF file with the model's metadata describes."""
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            _write_header(path, config, shape)
            return read_config(GGUFFile(path))
    except OSError as error:
        raise ConfigError(f"A temporary file cannot be written: {error.strerror}.") from None
    except ModelError as error:
        reason = str(error).replace(f"{path}: ", "")
        raise ModelError(
            f"The model cannot be quantized, because a GGUF file cannot describe it. {reason}"
        ) from None


def _write_header(path: Path, config: Mapping[str, Any], shape: Any) -> None:
    """Write metadata and the tensors on which the configuration depends; zeros are not stored."""
    writer = GGUFWriter(None, architecture_of(config)[0])
    add_metadata(writer, config, shape)
    divisors_F = rope_divisors(shape)
    values = b""
    if divisors_F is not None:
        values = divisors_F.numpy().tobytes()
        writer.add_tensor_info(ROPE_FACTORS, divisors_F.shape, np.dtype(np.float32), len(values))
    size = writer.ggml_pad(len(values), writer.data_alignment)
    for name, dimensions in _tensors(config, shape):
        num_bytes = 2 * math.prod(dimensions)
        writer.add_tensor_info(name, dimensions, np.dtype(np.float16), num_bytes)
        size += writer.ggml_pad(num_bytes, writer.data_alignment)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        begin = writer.ggml_pad(path.stat().st_size, writer.data_alignment)
        file.seek(begin)
        file.write(values)
        file.truncate(begin + size)


def _tensors(config: Mapping[str, Any], shape: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "token_embd.weight", (shape.vocab_size, shape.hidden_size)
    if not shape.tied:
        yield "output.weight", (1,)
    if shape.attention.qkv_bias:
        yield "blk.0.attn_q.bias", (1,)
    if shape.mlp_bias:
        yield "blk.0.ffn_gate.bias", (1,)
    if size := shared_expert_size(config):
        yield "blk.0.ffn_down_shexp.weight", (size,)
    for layer in range(shape.num_layers):
        yield f"blk.{layer}.attn_norm.weight", (shape.hidden_size,)
        if shape.num_experts:
            router = (shape.num_experts, shape.hidden_size)
            yield f"blk.{layer}.ffn_gate_inp.weight", router


def _facts(config: Mapping[str, Any], shape: Any) -> _Facts:
    """Return the fields of a shape, and the lengths that the configuration states."""
    facts = {
        name: pair
        for item in fields(shape)
        for name, pair in _flat(item.name, getattr(shape, item.name))
    }
    length = stated_max_model_len(config)
    if length is not None:
        lengths = (length.tokens, length.maximum)
        facts["max_model_len"] = (lengths, lengths)
    return facts


def _flat(name: str, value: Any) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield the values in a field of a shape. Functions are compared by what they enclose."""
    if hasattr(value, "rotary_dim"):
        frequency_F, scale = rope_frequencies(value.parameters, value.rotary_dim)
        yield f"{name}.parameters", ((scale, *frequency_F.tolist()), dict(value.parameters))
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _flat(f"{name}.{item.name}", getattr(value, item.name))
    elif isinstance(value, tuple) and not all(isinstance(item, int | float) for item in value):
        for index, item in enumerate(value):
            yield from _flat(f"{name}[{index}]", item)
    elif isinstance(value, FunctionType) and value.__closure__:
        yield name, (value.__code__, value.__qualname__)
        for variable, cell in zip(value.__code__.co_freevars, value.__closure__, strict=True):
            yield from _flat(f"{name}.{variable}", cell.cell_contents)
    else:
        yield name, (value, value)


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=_TOLERANCE)
    return value == other

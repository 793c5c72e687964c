"""Writes a quantized model: a directory with one GGUF file and the files of the tokenizer.

Dimensions: O output features, B bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ModelError
from dovetail_gguf.model_config import ROPE_FACTORS
from dovetail_gguf.model_format import GENERATION_FILE
from dovetail_gguf.reader import GGUFFile
from dovetail_gguf.tensor_names import to_file_name
from dovetail_gguf.weight_loader import permute_rows
from dovetail_quantize.metadata import (
    add_metadata,
    add_tokenizer,
    architecture_of,
    permuted_heads,
    rope_divisors,
)
from dovetail_quantize.round_trip import read_shape

FILE = "model.gguf"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "added_tokens.json",
)

Tensor = tuple[str, torch.Tensor]
"""The block type ("F32", "BF16", "Q4_K", …), and values or rows of blocks, uint8 [O, B]."""


def write_checkpoint(folder: Path, original: ModelDirectory, tensors: Mapping[str, Tensor]) -> None:
    """Write the file and compare it with the tensors, by the model's names."""
    config = original.config
    shape = read_shape(config)
    heads = permuted_heads(config, shape.heads)
    stored = {
        to_file_name(name): _permuted(tensor, heads.get(_leaf(name), 0))
        for name, tensor in tensors.items()
    }
    divisors_F = rope_divisors(shape)
    if divisors_F is not None:
        stored[ROPE_FACTORS] = ("F32", divisors_F)
    writer = GGUFWriter(None, architecture_of(config)[0])
    add_metadata(writer, config, shape)
    add_tokenizer(writer, original)
    for name, (type_name, values) in stored.items():
        kind = GGMLQuantizationType[type_name]
        writer.add_tensor(name, _as_numpy(values), raw_dtype=kind)
    path = folder / FILE
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _compare(path, stored)
    copy_files(folder, original.path)


def copy_files(folder: Path, source: Path) -> None:
    """Copy the sampling defaults and, if a GGUF file would have no vocabulary, the tokenizer."""
    names = () if _has_vocabulary(source) else TOKENIZER_FILES
    files = source if source.is_dir() else source.parent
    for name in (GENERATION_FILE, *names):
        if (files / name).is_file():
            shutil.copyfile(files / name, folder / name)


def _has_vocabulary(source: Path) -> bool:
    """Return whether the model is a GGUF file with a vocabulary, which is then copied."""
    return source.is_file() and "tokenizer.ggml.model" in GGUFFile(source).metadata


def _permuted(tensor: Tensor, num_heads: int) -> Tensor:
    type_name, values = tensor
    return type_name, permute_rows(values, num_heads) if num_heads else values


def _leaf(name: str) -> str:
    return ".".join(name.split(".")[-3:-1])


def _as_numpy(values: torch.Tensor) -> np.ndarray:
    """Return the values. Convert bfloat16 values to bytes, as the writer requires."""
    values = values.contiguous()
    return (values.view(torch.uint8) if values.dtype == torch.bfloat16 else values).numpy()


def _compare(path: Path, stored: Mapping[str, Tensor]) -> None:
    """Raise ModelError unless the file has exactly these tensors."""
    file = GGUFFile(path)
    for name, (type_name, values) in stored.items():
        info = file.tensors.get(name)
        same = info is not None and info.type.name == type_name
        if not same or file.data(name) != memoryview(_as_numpy(values)).cast("B"):
            raise ModelError(f"{path}: the tensor {name} was not written correctly.")

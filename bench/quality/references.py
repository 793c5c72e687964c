"""Writes the model of a GGUF file as a Hugging Face directory in bfloat16, for references.

published: the values of the file.
off_grid: uniform noise of up to half a quantization step is added to each value of a quantized
    block, so that no format can recover the quantization of the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from dovetail.tokenizers.core_building import as_json
from dovetail_gguf.dequantize import dequantize, plain_tensor
from dovetail_gguf.model_config import get_architecture, read_config, read_generation_config
from dovetail_gguf.reader import GGUFFile, TensorInfo
from dovetail_gguf.tensor_names import IGNORED, to_model_name
from dovetail_gguf.tokenizer_content import tokenizer_content
from dovetail_gguf.vocabulary import read_vocabulary
from dovetail_gguf.weight_loader import restore_rows

SEED = 16
STEPPED = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"})
"""Types of blocks that begin with their quantization step, as float16."""
HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def write_reference(source: Path, folder: Path, *, off_grid: bool, seed: int = SEED) -> Path:
    """Write the directory and return it. With a tokenizer if the file has one.

    With `off_grid`, raises ValueError for a quantized tensor whose steps are not known.
    """
    file = GGUFFile(source)
    config = read_config(file)
    permutes = get_architecture(file)[1].permutes_rotary
    random = np.random.default_rng(seed)
    tensors = {}
    for stored, info in sorted(file.tensors.items()):
        if stored in IGNORED:
            continue
        name = to_model_name(stored)
        values = _values(file, info, random if off_grid else None)
        part = name.split(".")[-2]
        if permutes and part in HEADS:
            values = restore_rows(values, config[HEADS[part]])
        tensors[name] = values.to(torch.bfloat16).contiguous()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", read_generation_config(file))
    if "tokenizer.ggml.model" in file.metadata:
        content = tokenizer_content(read_vocabulary(file))
        (folder / "tokenizer.json").write_bytes(as_json(content))
    return folder


def _values(file: GGUFFile, info: TensorInfo, random: np.random.Generator | None) -> torch.Tensor:
    memory = file.data(info.name)
    if info.type.is_plain:
        return plain_tensor(memory, info.type, info.shape)
    blocks_OB = torch.frombuffer(memory, dtype=torch.uint8).view(info.shape[0], -1)
    values = dequantize(blocks_OB, info.type).view(info.shape)
    if random is None:
        return values
    if info.type.name not in STEPPED:
        kind = info.type.name
        raise ValueError(f"{info.name} has the type {kind}, whose quantization steps are not known")
    blocks = np.frombuffer(memory, np.uint8).reshape(-1, info.type.num_bytes)
    steps_N1 = np.abs(blocks[:, :2].copy().view(np.float16).astype(np.float32))
    noise = random.random((len(blocks), info.type.num_values), dtype=np.float32) - 0.5
    return values + torch.from_numpy(noise * steps_N1).view(info.shape)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

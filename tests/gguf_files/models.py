"""Writes the model of a model directory to a GGUF file, by the rules of llama.cpp's converter.

Source: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH
from gguf.quants import quantize
from safetensors.numpy import load_file

from gguf_files.vocabularies import add_vocabulary, finish


def write_model(
    folder: Path,
    path: Path,
    *,
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str | None = None,
) -> Path:
    """Write the Llama in `folder` to the file `path`. type_: quantization type of the matrices.

    pre: name of the pre-tokenizer of a byte-level tokenizer in `folder`; None to write no
    tokenizer.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if pre is not None:
        add_vocabulary(writer, folder, pre=pre)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        projection = name.split(".")[-2]
        if projection in heads:
            weight = permute_rows(weight, heads[projection])
        kind = type_ if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(stored, quantize(weight, kind), raw_dtype=kind)
    finish(writer)
    return path


def permute_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return the rows in the order of the file: first and second half of each head alternate."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))

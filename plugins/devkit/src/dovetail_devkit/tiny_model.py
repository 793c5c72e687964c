"""A model directory of a few kilobytes with random weights, written without any tensor library.

The variance of the weights is so large that the largest logit is much larger than the second. A
safetensors file consists of the length of a JSON header, the header, and the numbers
(https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import struct
from array import array
from math import prod
from pathlib import Path
from random import Random
from typing import Any

TINY_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
STANDARD_DEVIATION = 0.3


def write_tiny_llama(directory: Path, *, seed: int = 0, **fields: Any) -> Path:
    """Write config.json and model.safetensors of a Llama with 2 layers. Return `directory`.

    fields: values that replace those of `TINY_LLAMA`, including sizes. The same seed gives the same
    bytes.
    """
    config = TINY_LLAMA | fields
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_safetensors(directory / "model.safetensors", llama_shapes(config), seed=seed)
    return directory


TINY_EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
"""Fields that make a Qwen3-MoE of `TINY_LLAMA`."""


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the weights of a Llama, by checkpoint name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_size = config["num_attention_heads"] * config["head_dim"]
    kv_size = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def qwen3_moe_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the weights of a Qwen3-MoE with experts in all layers, by checkpoint name."""
    shapes = {name: size for name, size in llama_shapes(config).items() if ".mlp." not in name}
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    num_experts, norm = config["num_experts"], (config["head_dim"],)
    layer: dict[str, tuple[int, ...]] = {"mlp.gate": (num_experts, hidden)}
    for expert in range(num_experts):
        name = f"mlp.experts.{expert}"
        layer |= {f"{name}.gate_proj": (inner, hidden), f"{name}.up_proj": (inner, hidden)}
        layer[f"{name}.down_proj"] = (hidden, inner)
    layer |= {"self_attn.q_norm": norm, "self_attn.k_norm": norm}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": size for name, size in layer.items()}
    return shapes


def write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]], *, seed: int = 0) -> None:
    """Write random float32 weights: matrices around 0, vectors around 1."""
    rng = Random(seed)
    header: dict[str, Any] = {}
    pieces = []
    end = 0
    for name, shape in shapes.items():
        mean = 1.0 if len(shape) == 1 else 0.0
        numbers = array("f", (rng.gauss(mean, STANDARD_DEVIATION) for _ in range(prod(shape))))
        start, end = end, end + len(numbers) * numbers.itemsize
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        pieces.append(numbers.tobytes())
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))

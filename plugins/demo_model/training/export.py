"""Write a trained network as a Hugging Face folder: bfloat16 safetensors, config, tokenizer.

Contract: `transformers` loads the directory as `LlamaForCausalLM` with tied embeddings. By default
it samples greedily and stops at <|eos|>. This module does not depend on the training loop.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from network import Llama, Shape
from safetensors.torch import save_file
from tokenizer import BOS, EOS, PAD, save_tokenizer
from tokenizers import Tokenizer


def _config(shape: Shape, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "use_cache": True,
    }


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(network: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the directory. Replace files of the same names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(network.shape, tokenizer)
    _write_json(folder / "config.json", config)
    generation = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(
        folder / "generation_config.json", {**generation, "do_sample": False, "temperature": 0.0}
    )
    weights = {
        name: weight.detach().to(torch.bfloat16).contiguous()
        for name, weight in network.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_tokenizer(tokenizer, folder, network.shape.max_positions)

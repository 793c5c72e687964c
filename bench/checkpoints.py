"""Random-weight checkpoints in the shapes of real models, for benchmarks.

The weights have the usual distribution for benchmarks: bfloat16, normal(0, 0.02), norm weights 1, a
fixed seed. The generated text is meaningless, but the speed is that of the real model. The models
of `STATE_SHAPES` have the initial weights that transformers creates.

python bench/checkpoints.py [--gptq] NAME …

writes checkpoints to .bench/NAME, for `cpu_vs.py --model .bench/NAME`. With `--gptq`, linear layers
have random codes of 4 bits in groups of 128 (.bench/NAME-gptq, 5.6 GB for qwen3-8b-shape).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {
    "llama-160m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "qwen3-0.6b-shape": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "qwen3-8b-shape": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "llama-1b-shape": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    "qwen3-moe-1b-shape": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 1024,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 3072,
        "moe_intermediate_size": 256,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
}
STATE_SHAPES = {
    "mamba2-130m-shape": {
        "model_type": "mamba2",
        "hidden_size": 768,
        "num_hidden_layers": 24,
        "num_heads": 24,
        "head_dim": 64,
        "n_groups": 1,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "vocab_size": 50288,
        "tie_word_embeddings": True,
    },
    "qwen3-next-small-shape": {
        "model_type": "qwen3_next",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 2048,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
}
"""Models with recurrent layers."""
GROUP = 128
"""Input features with the same scale in GPTQ checkpoints."""
_COMMON = {"hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}


def make_checkpoint(name: str, folder: Path, num_layers: int = 0) -> Path:
    """Return the directory of a checkpoint of the given shape. Write it if it does not exist.

    num_layers: number of layers; 0 for the number that the shape has.
    """
    if name in STATE_SHAPES:
        return _make_with_transformers(name, folder, num_layers)
    config = dict(SHAPES[name])
    path = folder / name
    if num_layers not in (0, config["num_hidden_layers"]):
        config["num_hidden_layers"] = num_layers
        path = folder / f"{name}-{num_layers}-layers"
    weights = path / "model.safetensors"
    if weights.exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**config, **_COMMON}, indent=2), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        weight: torch.ones(shape, dtype=torch.bfloat16)
        if weight.endswith("norm.weight")
        else (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)
        for weight, shape in _weights(config).items()
    }
    part = weights.with_suffix(".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.rename(weights)
    return path


def make_gptq_checkpoint(name: str, folder: Path) -> Path:
    """Return the directory of a GPTQ checkpoint of the given shape. Write it if it does not exist.

    Each layer has a shard, so that one layer is in memory at a time.
    """
    config, path = dict(SHAPES[name]), folder / f"{name}-gptq"
    index = path / "model.safetensors.index.json"
    if index.exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    table = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
    fields = {**config, **_COMMON, "quantization_config": {**table, "sym": True}}
    (path / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for weight, shape in _weights(config).items():
        parts = weight.split(".")
        shard = f"layer-{parts[2]}" if parts[1] == "layers" else weight
        shards.setdefault(f"{shard}.safetensors", {})[weight] = shape
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    for file, weights in shards.items():
        tensors: dict[str, torch.Tensor] = {}
        for weight, shape in weights.items():
            if len(shape) == 2 and ".layers." in weight:
                prefix = weight.removesuffix("weight")
                tensors |= _gptq_tensors(prefix, shape, generator)
            elif len(shape) == 2:
                values = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
                tensors[weight] = values.mul_(0.02)
            else:
                tensors[weight] = torch.ones(shape, dtype=torch.bfloat16)
        save_file(tensors, path / file, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    return path


def _gptq_tensors(
    prefix: str, shape: tuple[int, ...], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return random codes of 4 bits, with the zero points of version 1 (8, stored as 7)."""
    num_outputs, num_inputs = shape
    codes = torch.randint(
        -(1 << 31), 1 << 31, (num_inputs // 8, num_outputs), dtype=torch.int32, generator=generator
    )
    num_groups = num_inputs // GROUP
    scales = torch.rand((num_groups, num_outputs), generator=generator).mul_(0.004).add_(0.001)
    zeros = torch.full((num_groups, num_outputs // 8), 0x77777777, dtype=torch.int32)
    return {
        f"{prefix}qweight": codes,
        f"{prefix}qzeros": zeros,
        f"{prefix}scales": scales.half(),
    }


def _make_with_transformers(name: str, folder: Path, num_layers: int) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(STATE_SHAPES[name])
    num_layers = num_layers or fields["num_hidden_layers"]
    path = folder / f"{name}-{num_layers}-layers"
    if num_layers == fields["num_hidden_layers"]:
        path = folder / name
    if not (path / "model.safetensors").exists():
        torch.manual_seed(0)
        fields |= {"num_hidden_layers": num_layers, "bos_token_id": 1, "eos_token_id": 2}
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def _weights(config: dict) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    for number in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, q),
            "post_attention_layernorm": (hidden,),
            **_mlp(config),
        }
        if config["model_type"].startswith("qwen3"):
            layer["self_attn.q_norm"] = layer["self_attn.k_norm"] = (config["head_dim"],)
        shapes |= {f"model.layers.{number}.{part}.weight": s for part, s in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def _mlp(config: dict) -> dict[str, tuple[int, ...]]:
    """Return the weights of a layer's MLP, or of its router and experts."""
    hidden, num_experts = config["hidden_size"], config.get("num_experts", 0)
    inner = config["moe_intermediate_size" if num_experts else "intermediate_size"]
    parts = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if not num_experts:
        return {f"mlp.{part}": shape for part, shape in parts.items()}
    experts = {
        f"mlp.experts.{expert}.{part}": shape
        for expert in range(num_experts)
        for part, shape in parts.items()
    }
    return {"mlp.gate": (num_experts, hidden), **experts}


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if argument != "--gptq"]
    make = make_gptq_checkpoint if "--gptq" in sys.argv else make_checkpoint
    for shape in names:
        print(make(shape, Path(".bench")))

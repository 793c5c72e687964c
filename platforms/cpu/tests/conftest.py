"""Fixtures of the CPU platform's tests: checkpoints of first-party and third-party models."""

import json

import pytest
import torch
from safetensors.torch import save_file

from dovetail_cpu.threads import sharing
from dovetail_devkit.tiny_model import (
    TINY_EXPERTS,
    TINY_LLAMA,
    llama_shapes,
    qwen3_moe_shapes,
)

V, D, INNER = 97, 64, 96
SHAPE = TINY_LLAMA | {
    "hidden_size": D,
    "intermediate_size": INNER,
    "head_dim": 32,
    "vocab_size": V,
    "torch_dtype": "bfloat16",
}
EXPERTS = "Qwen3MoeForCausalLM"
OURS = ("LlamaForCausalLM", "Qwen3ForCausalLM", EXPERTS)
OUTSIDE_SHAPES = {
    "table.weight": (V, D),
    "q_proj.weight": (128, D),
    "k_proj.weight": (64, D),
    "v_proj.weight": (64, D),
    "out.weight": (D, 128),
    "a.weight": (INNER, D),
    "b.weight": (INNER, D),
    "down.weight": (D, INNER),
    "mix.weight": (D, D),
    "mix.bias": (D,),
    "norm.weight": (D,),
    "head.weight": (V, D),
}


@pytest.fixture(autouse=True)
def same_threads(monkeypatch):
    """Keep the threads as they were, and forget engines of other tests that were not deleted."""
    monkeypatch.setattr(sharing, "_numbers", {})
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def write_bf16(tmp_path):
    """Returns a function that writes a small checkpoint of an architecture and returns its path.

    Third-party architectures are classes of `out_of_tree_decoder.py`. A config.json cannot name
    them, so start their engines with `hf_overrides`.
    """

    def write(architecture):
        config = SHAPE | (TINY_EXPERTS if architecture == EXPERTS else {})
        config["architectures"] = [architecture]
        shapes = (qwen3_moe_shapes if architecture == EXPERTS else llama_shapes)(config)
        if architecture == "Qwen3ForCausalLM":
            for number in range(config["num_hidden_layers"]):
                for norm in ("q_norm", "k_norm"):
                    shapes[f"model.layers.{number}.self_attn.{norm}.weight"] = (config["head_dim"],)
        if architecture not in OURS:
            shapes = OUTSIDE_SHAPES
        generator = torch.Generator().manual_seed(4)
        weights = {
            name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).bfloat16()
            for name, shape in shapes.items()
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(weights, tmp_path / "model.safetensors")
        return tmp_path

    return write

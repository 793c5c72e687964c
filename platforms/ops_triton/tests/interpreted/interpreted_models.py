"""Models in the interpreter: operations of states and of latent attention use these kernels."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from dovetail import LLM, SamplingParams
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_ops_triton import kernels

COMMON = {"vocab_size": 320, "num_hidden_layers": 2, "hidden_size": 64}
MAMBA2 = {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16}
NEXT = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
DEEPSEEK = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 512,
}
LATENT = {"latent_inputs", "head_linear", "select_experts", "fused_experts", "add_shared_expert"}
STATES = {"causal_conv", "linear_attention", "gated_rms_norm", "look_up"}
MIXED = {"sigmoid_and_mul", "add_shared_expert", "select_experts", "fused_experts", "rotate"}


@pytest.fixture
def called(monkeypatch):
    """The names of the functions of kernels that were called."""
    names = set()

    def recording(name, function):
        def call(*args, **kwargs):
            names.add(name)
            return function(*args, **kwargs)

        return call

    for name in kernels.__all__:
        monkeypatch.setattr(kernels, name, recording(name, getattr(kernels, name)))
    return names


@pytest.mark.parametrize(
    ("create", "expected"),
    [
        (lambda: Mamba2ForCausalLM(Mamba2Config(**COMMON | MAMBA2)), STATES | {"add_rms_norm"}),
        (lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON | DEEPSEEK)), LATENT),
        (lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**COMMON | NEXT)), STATES | MIXED),
    ],
    ids=["mamba2", "deepseek_v3", "qwen3_next"],
)
def test_a_model_has_the_same_tokens_with_triton_and_torch(create, expected, called, tmp_path):
    torch.manual_seed(1)
    create().save_pretrained(tmp_path)
    answers = []
    for name in ("torch", "triton"):
        assert not called
        options = SMALL_ENGINE | {"ops": name, "dtype": "float32", "block_size": 16}
        with LLM(str(tmp_path), **options, skip_tokenizer_init=True) as llm:
            prompts = [[1, 2, 3], list(range(20, 60))]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]
    assert expected <= called

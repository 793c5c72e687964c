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
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from dovetail import LLM, SamplingParams
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.small_configs import DEEPSEEK_V3, MAMBA2, QWEN3_NEXT, RECURRENT_GEMMA
from dovetail_ops_triton import kernels

LATENT = {"latent_inputs", "head_linear", "select_experts", "fused_experts", "add_shared_expert"}
STATES = {"causal_conv", "linear_attention", "gated_rms_norm", "look_up"}
RECURRENCES = {"causal_conv", "gated_recurrence", "head_linear", "look_up"}
MIXED = {"sigmoid_and_mul", "add_shared_expert", "select_experts", "fused_experts", "rotate"}


@pytest.fixture
def called(monkeypatch):
    """The names of the called functions that launch kernels."""
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
        (lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA2)), STATES | {"add_rms_norm"}),
        (lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK_V3)), LATENT),
        (lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN3_NEXT)), STATES | MIXED),
        (
            lambda: RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**RECURRENT_GEMMA)),
            RECURRENCES | {"rms_norm", "rotate", "gelu_tanh_and_mul", "scale", "soft_cap"},
        ),
    ],
    ids=["mamba2", "deepseek_v3", "qwen3_next", "recurrent_gemma"],
)
def test_a_model_generates_the_same_tokens_with_triton_and_torch(
    create, expected, called, tmp_path
):
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

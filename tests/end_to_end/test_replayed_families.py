"""Models of many families are replayed, and are batch-invariant.

They have recurrent layers, latent attention, shared experts, gated GELU, scales and soft caps.
Models in bfloat16 with the native kernels of the CPU.
"""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError
from dovetail_cpu.native_library import probe_fast
from dovetail_devkit.small_configs import COMMON, MAMBA2, QWEN3_NEXT, RECURRENT_GEMMA
from end_to_end.checkpoints import OPTIONS

pytestmark = pytest.mark.skipif(not probe_fast().usable, reason="native kernels are not usable")

OWN = OPTIONS | {"dtype": "bfloat16", "load_format": "auto", "skip_tokenizer_init": True}
OWN |= {"block_size": 16, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 48}
DEEPSEEK = COMMON | {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
DENSE = COMMON | {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
FAMILIES = {
    "mamba2": lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA2)),
    "mamba2, a wide kernel": lambda: Mamba2ForCausalLM(
        Mamba2Config(**MAMBA2 | {"conv_kernel": 11, "n_groups": 1})
    ),
    "qwen3_next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN3_NEXT)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)),
    "recurrent_gemma": lambda: RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**RECURRENT_GEMMA)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**DENSE)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**DENSE, attn_logit_softcapping=4.0, final_logit_softcapping=5.0)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**DENSE, sliding_window=24)),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(**DENSE, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2)
    ),
}


every_family = pytest.mark.parametrize("folder", FAMILIES, indirect=True)


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    return write(FAMILIES[request.param](), tmp_path_factory.mktemp("replayed"))


def write(model, path):
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def requests(count):
    """Return prompts of different lengths; some are longer than a step, some share a prefix."""
    prompts = [
        [(7 * i + 3 * number) % 300 for i in range(1 + 11 * number)] for number in range(count - 2)
    ]
    prompts += [[(5 * i) % 300 for i in range(length)] for length in (40, 75)]
    params = [
        SamplingParams(
            temperature=number % 2, max_tokens=6 + number, ignore_eos=True, logprobs=2, seed=number
        )
        for number in range(count)
    ]
    return prompts, params


def bits(llm, prompts, params):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(out.outputs[0].token_ids, out.outputs[0].logprobs) for out in outputs]


def counts_of(llm):
    return llm.llm_engine.client.core.executor._worker._runner.graph_counts


@pytest.mark.costly
@pytest.mark.parametrize("folder", FAMILIES, indirect=True)
def test_replayed_steps_are_bitwise_equal_to_eager_steps(folder, caplog):
    prompts, params = requests(7)
    with LLM(folder, **OWN, enforce_eager=True) as llm:
        expected = [bits(llm, prompts, params) for _ in range(2)]
        assert counts_of(llm).captured == 0
    with LLM(folder, **OWN) as llm:
        assert [bits(llm, prompts, params) for _ in range(2)] == expected
        assert counts_of(llm).replayed > 5, counts_of(llm)
    warnings = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert not any("eagerly" in warning for warning in warnings), warnings


@pytest.mark.costly
@every_family
@pytest.mark.parametrize("caching", [False, True])
def test_the_outputs_of_a_request_are_bitwise_equal_alone_and_in_every_batch(folder, caching):
    """Prompts are computed whole or in chunks, after cached prefixes, and after preemptions."""
    prompts, params = requests(7)
    own = OWN | {"batch_invariant": True}
    with LLM(folder, **own | {"enable_prefix_caching": False}) as llm:
        alone = [
            bits(llm, [prompt], [own_params])[0]
            for prompt, own_params in zip(prompts, params, strict=True)
        ]
    for options in (
        {"max_num_batched_tokens": 512, "num_threads": 2},
        {"max_num_batched_tokens": 13, "num_threads": 1, "enforce_eager": True},
    ):
        with LLM(folder, **own | {"enable_prefix_caching": caching} | options) as llm:
            assert bits(llm, prompts, params) == alone
            assert bits(llm, prompts[::-1], params[::-1]) == alone[::-1]


@pytest.mark.costly
@every_family
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ops": "torch"}, "ops TorchOps"),
        ({"dtype": "float32"}, "dtype='float32'"),
    ],
)
def test_batch_invariance_is_rejected_without_the_native_operations(folder, options, message):
    with pytest.raises(DovetailError, match=message):
        LLM(folder, **OWN | {"batch_invariant": True} | options)

"""Latent attention: cases that the conformance suite does not cover, and an engine.

Runs as interpreted_attention.py does.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_rows import DEVICE
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from dovetail import LLM, SamplingParams
from dovetail.errors import ContractError
from dovetail_attn_triton.backend import TritonAttentionBackend
from dovetail_devkit.attention.rows import AttentionRows
from dovetail_devkit.contexts import SMALL_ENGINE
from dovetail_devkit.small_configs import DEEPSEEK_V3
from dovetail_devkit.suites.attention import AttentionCase, check_case

LATENT = AttentionCase(
    runs=((20, 1), (3, 9), (0, 40)), num_heads=4, num_kv_heads=1, head_size=96, value_size=64
)


@pytest.mark.parametrize("num_heads", [1, 5, 20, 40, 128])
def test_latent_attention_is_correct_for_any_number_of_heads(num_heads):
    """Up to 32 heads fit a program; more are divided into blocks, the last of which may be
    smaller."""
    check_case(TritonAttentionBackend, replace(LATENT, num_heads=num_heads), DEVICE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_latent_vector_size_of_deepseek_models_is_supported(dtype):
    case = replace(LATENT, dtype=dtype, num_heads=16, head_size=576, value_size=512, seed=1)
    check_case(TritonAttentionBackend, replace(case, runs=((90, 1), (5, 7))), DEVICE)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("num_heads", [3, 40])
def test_latent_attention_splits_a_long_context(num_heads):
    case = replace(LATENT, runs=((300, 1), (70, 1)), num_heads=num_heads, padding=64, seed=2)
    rows = AttentionRows(TritonAttentionBackend, case, DEVICE)
    rows.step("contexts", [(0, 0, 300), (1, 0, 70)])
    runs = [(0, 300, 1), (1, 70, 1)]
    (launch,) = rows.builder.build(rows.batch(runs)).passes(rows.layer._shape)
    assert launch.num_splits > 2
    rows.step("runs", runs)


def test_latent_layers_reject_the_metadata_of_another_kv_cache_group():
    own = AttentionRows(TritonAttentionBackend, LATENT, DEVICE)
    other = AttentionRows(TritonAttentionBackend, replace(LATENT, value_size=32), DEVICE)
    own.builder = other.builder
    with pytest.raises(ContractError, match=r"\(96, 64\), but its KV-cache group has \(96, 32\)"):
        own.step("runs", [(0, 0, 3)])


def test_a_deepseek_model_generates_the_same_tokens_with_triton_and_torch(tmp_path):
    """The operations with Triton kernels select and compute the experts, too."""
    torch.manual_seed(1)
    DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK_V3)).save_pretrained(tmp_path)
    answers = []
    for name in ("torch", "triton"):
        options = SMALL_ENGINE | {"attention_backend": name, "ops": name, "block_size": 16}
        with LLM(str(tmp_path), **options, skip_tokenizer_init=True) as llm:
            prompts = [[1, 2, 3], list(range(20, 40))]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4))
            answers.append([list(output.outputs[0].token_ids) for output in outputs])
    assert answers[0] == answers[1]

"""Llama 4 is served with the default options by every attention backend for this device."""

from __future__ import annotations

import pytest
import torch
from transformers import Llama4ForCausalLM, Llama4TextConfig

import dovetail_cpu_kernels as native
from dovetail import LLM, SamplingParams
from dovetail.errors import DovetailError
from end_to_end.checkpoints import OPTIONS

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
USED = OPTIONS | {"dtype": "bfloat16", "load_format": "auto", "skip_tokenizer_init": True}
USED |= {"block_size": 16}
PROMPTS = [[(7 * i + n) % 300 + 3 for i in range(n)] for n in (31, 100, 1, 64)]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("chunked")
    model = Llama4ForCausalLM(Llama4TextConfig(**SIZES))
    for parameter in model.parameters():  # experts are not initialized
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


def tokens_of(folder, **options):
    with LLM(folder, **USED | options) as llm:
        done = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in done]


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"async_scheduling": True}])
def test_the_default_backend_serves_chunked_attention(folder, options, caplog):
    with caplog.at_level("INFO", "dovetail_torch"):
        tokens = tokens_of(folder, **options)
    assert [len(row) for row in tokens] == [4] * 4
    backend = "cpu" if native.status().available else "torch"
    assert f"attention backend: {backend}." in caplog.text


def test_native_chunked_attention_generates_the_same_first_tokens_as_torch(folder):
    if not native.status().available:
        pytest.skip(native.status().reason)
    expected = tokens_of(folder, attention_backend="torch")
    tokens = tokens_of(folder, attention_backend="cpu")
    assert [row[0] for row in tokens] == [row[0] for row in expected]


def test_a_block_size_that_does_not_divide_the_chunk_is_rejected(folder):
    with pytest.raises(DovetailError, match="Choose a block_size that divides 32"):
        LLM(folder, **USED | {"block_size": 48})


@pytest.mark.costly
def test_blocks_of_earlier_chunks_are_freed_and_other_requests_keep_their_tokens(folder):
    """A cache that is too small for all chunks gives the same tokens, also after preemptions."""
    prompts = [[(11 * i + n) % 300 + 3 for i in range(n)] for n in (250, 40, 170, 250)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    float32 = USED | {"dtype": "float32", "max_num_batched_tokens": 64, "max_model_len": 272}
    with LLM(folder, **float32) as llm:
        expected = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params)]
    # A request of 272 tokens has 17 blocks for the layer with full attention, and at most 7 for
    # each of three layers with chunks of 32 tokens, in steps of 64 tokens.
    small = float32 | {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 17 + 3 * 7 + 1}
    for options in ({}, {"enable_prefix_caching": True}):
        with LLM(folder, **small | options) as llm:
            for _ in range(2):  # the second time with prefix hits
                done = llm.generate(prompts, params, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in done] == expected

"""The native attention backend in the engine: close to the torch backend, and batch-invariant.

The first greedy token is compared with torch. A random model has flat logits in bf16, so only the
tokens of most prompts must be equal. All tokens of two native runs must be equal, because native
linear layers and attention give bitwise equal results for a token in any batch.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

import dovetail_cpu_kernels as native
from dovetail import LLM, SamplingParams
from dovetail.errors import EngineDeadError, PluginError
from dovetail_attn_cpu.backend import CPUAttentionBackend
from dovetail_attn_cpu.layer import CPUAttentionLayer
from end_to_end.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(not native.status().available, reason=native.status().reason)

PROMPTS = [[random.Random(n).randrange(5, 60) for _ in range(n)] for n in (1, 5, 40, 90, 120)]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory, one_thread):
    """Return the directory of a model with heads wide enough for the kernels."""
    return make_checkpoint(tmp_path_factory.mktemp("wide"), hidden_size=128)


@pytest.fixture(scope="module")
def tokens_of(wide_dir):
    """Return a function from engine options to the tokens of each prompt. Results are cached."""
    known = {}

    def tokens(**options):
        key = tuple(sorted(options.items()))
        if key not in known:
            with LLM(wide_dir, dtype="bfloat16", num_gpu_blocks_override=64, **options) as llm:
                outputs = llm.generate(PROMPTS, PARAMS)
            known[key] = [list(output.outputs[0].token_ids) for output in outputs]
        return known[key]

    return tokens


def agreement(actual, expected):
    """Return the share of prompts with the same first token."""
    return sum(a[0] == b[0] for a, b in zip(actual, expected, strict=True)) / len(expected)


@pytest.mark.costly
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_native_attention_gives_the_same_tokens_as_torch_attention_for_most_prompts(
    tokens_of, cache
):
    expected = tokens_of(attention_backend="torch")
    actual = tokens_of(attention_backend="cpu", kv_cache_dtype=cache)
    assert agreement(actual, expected) >= 0.8


@pytest.mark.costly
@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 32}, {"max_num_seqs": 1}, {"block_size": 32}],
    ids=["chunks", "alone", "blocks"],
)
def test_tokens_do_not_depend_on_prompt_chunks_batch_or_block_size(tokens_of, options):
    """Linear layers of torch depend on the number of rows, so tokens may differ rarely."""
    expected = tokens_of(attention_backend="cpu")
    assert tokens_of(attention_backend="cpu", **options) == expected


@pytest.fixture(scope="module")
def sink_dir(tmp_path_factory, one_thread):
    """Return the directory of a small gpt-oss whose sinks take much of the attention weight."""
    torch.manual_seed(5)
    config = GptOssConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        head_dim=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        sliding_window=37,
    )
    model, folder = GptOssForCausalLM(config), tmp_path_factory.mktemp("sinks")
    for layer in model.model.layers:
        layer.self_attn.sinks.data.uniform_(-1, 3)
    model.save_pretrained(folder)
    return folder


def served(folder, **options):
    """Return the tokens of a model, and the log-probabilities of the first tokens."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    options = {"dtype": "bfloat16", "skip_tokenizer_init": True} | options
    with LLM(folder, num_gpu_blocks_override=64, **options) as llm:
        requests = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = [output.outputs[0] for output in llm.generate(requests, params, use_tqdm=False)]
    values = [entry.logprob for output in outputs for entry in output.logprobs[0].values()]
    return [list(output.token_ids) for output in outputs], torch.tensor(values)


@pytest.mark.costly
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_a_model_with_sinks_selects_native_attention(sink_dir, cache, monkeypatch, caplog):
    create, contexts = CPUAttentionBackend.create_layer, []

    def note(context):
        contexts.append(context)
        return create(context)

    monkeypatch.setattr(CPUAttentionBackend, "create_layer", staticmethod(note))
    tokens, logprobs = served(sink_dir, kv_cache_dtype=cache)
    assert [context.sinks is None for context in contexts] == [False, False]
    assert "cannot be replayed" not in caplog.text
    chunked, chunked_logprobs = served(sink_dir, kv_cache_dtype=cache, max_num_batched_tokens=32)
    assert chunked == tokens and torch.equal(chunked_logprobs, logprobs)
    expected, want_logprobs = served(sink_dir, attention_backend="torch")
    assert agreement(tokens, expected) >= 0.8
    assert (logprobs - want_logprobs).abs().max() < 0.05


def test_native_attention_is_rejected_for_an_unsupported_dtype_with_the_reason(wide_dir):
    with pytest.raises(PluginError, match="dtype float32 is not supported; supported: bfloat16"):
        LLM(wide_dir, dtype="float32", attention_backend="cpu", num_gpu_blocks_override=64)


def test_a_failed_allocation_in_a_kernel_stops_the_engine_and_the_error_names_the_kernel(
    wide_dir, monkeypatch
):
    """A kernel computes all requests of a step in one call, so none of them can continue."""

    def fail(*args):
        raise native.NativeMemoryError("dk_attention", 4096)

    with LLM(wide_dir, dtype="bfloat16", num_gpu_blocks_override=64) as llm:
        monkeypatch.setattr(CPUAttentionLayer, "forward", fail)
        with pytest.raises(EngineDeadError, match="dk_attention needs 4096 bytes"):
            llm.generate(PROMPTS[:2], PARAMS)

"""DeepSeek models are served: plain and quantized checkpoints, and weights quantized at loading."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import dovetail_cpu_kernels as native
from dovetail import LLM
from dovetail.errors import DovetailError
from dovetail_devkit.small_configs import DEEPSEEK_V3
from end_to_end.checkpoints import OPTIONS
from end_to_end.quantized_checkpoints import GREEDY, PROMPTS, outputs
from end_to_end.quantized_writers import FORMATS, write

ROUTER = ".mlp.gate."
SIZES = DEEPSEEK_V3 | {"moe_intermediate_size": 96}
BFLOAT16 = OPTIONS | {"dtype": "bfloat16", "load_format": "auto", "skip_tokenizer_init": True}
BFLOAT16 |= {"block_size": 16}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("latent")
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).save_pretrained(folder)
    return folder


def test_fp8_weights_of_latent_attention_give_the_same_outputs_as_dequantized_weights(
    plain, tmp_path
):
    written = FORMATS["fp8_blocks"]
    written = replace(written, skipped=(*written.skipped, ROUTER))
    quantized, values = write(plain, tmp_path, written)
    options = {"skip_tokenizer_init": True}
    tokens, rows, loader = outputs(quantized, **options)
    expected, expected_rows, _ = outputs(values, **options)
    assert "quantized_safetensors" in str(loader)
    assert tokens == expected
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


def tokens_of(plain, **options):
    with LLM(plain, **BFLOAT16 | options) as llm:
        done = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in done]


@pytest.mark.costly
@pytest.mark.parametrize(
    "options", [{}, {"quantization": "int8"}, {"async_scheduling": True}, {"max_num_seqs": 1}]
)
def test_the_default_backend_serves_latent_attention(plain, options, caplog):
    with caplog.at_level("INFO", "dovetail_torch"):
        tokens = tokens_of(plain, **options)
    assert [len(row) for row in tokens] == [6, 6]
    backend = "cpu" if native.status().available else "torch"
    assert f"attention backend: {backend}." in caplog.text


@pytest.mark.costly
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_native_latent_attention_generates_the_same_first_tokens_as_torch(plain, cache):
    if not native.status().available:
        pytest.skip(native.status().reason)
    expected = tokens_of(plain, attention_backend="torch")
    tokens = tokens_of(plain, attention_backend="cpu", kv_cache_dtype=cache)
    assert [row[0] for row in tokens] == [row[0] for row in expected]


def test_batch_invariance_is_rejected_for_latent_attention_in_torch(plain):
    with pytest.raises(DovetailError, match="ops TorchOps supports batch invariance with no dtype"):
        LLM(plain, **BFLOAT16 | {"batch_invariant": True, "ops": "torch"})

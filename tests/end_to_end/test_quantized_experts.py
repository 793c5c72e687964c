"""Quantized checkpoints with experts give the same outputs as their dequantized values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from end_to_end.quantized_checkpoints import outputs
from end_to_end.quantized_writers import FORMATS, write

ROUTER = ".mlp.gate."
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("experts")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gptq_8_bits", "fp8_blocks"])
def test_quantized_experts_give_the_same_outputs_as_dequantized_weights(name, plain, tmp_path):
    written = FORMATS[name]
    written = replace(written, skipped=(*written.skipped, ROUTER))
    quantized, values = write(plain, tmp_path, written)
    options = {"skip_tokenizer_init": True}
    tokens, rows, loader = outputs(quantized, **options)
    expected, expected_rows, _ = outputs(values, **options)
    assert "quantized_safetensors" in str(loader)
    assert tokens == expected
    # One of the linear methods computes all experts in one call: other sums, other last bits.
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)

"""DeepSeek models are served with the default options, quantized checkpoints and quantization."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from dovetail import LLM
from dovetail.errors import DovetailError
from end_to_end.checkpoints import OPTIONS
from end_to_end.quantized_checkpoints import GREEDY, PROMPTS, outputs
from end_to_end.quantized_writers import FORMATS, write

ROUTER = ".mlp.gate."
SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 512,
}
BFLOAT16 = OPTIONS | {"dtype": "bfloat16", "load_format": "auto", "skip_tokenizer_init": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("latent")
    DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES)).save_pretrained(folder)
    return folder


def test_fp8_weights_of_latent_attention_give_the_outputs_of_their_values(plain, tmp_path):
    written = FORMATS["fp8_blocks"]
    written = replace(written, skipped=(*written.skipped, ROUTER))
    quantized, values = write(plain, tmp_path, written)
    options = {"skip_tokenizer_init": True}
    tokens, rows, loader = outputs(quantized, **options)
    expected, expected_rows, _ = outputs(values, **options)
    assert "quantized_safetensors" in str(loader)
    assert (tokens, rows) == (expected, expected_rows)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"async_scheduling": True}])
def test_the_default_backend_serves_latent_attention(plain, options):
    with LLM(plain, **BFLOAT16 | options) as llm:
        done = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in done] == [6, 6]


def test_a_backend_without_latent_attention_is_rejected_and_the_error_names_the_feature(plain):
    with pytest.raises(DovetailError, match="mla is required but not declared"):
        LLM(plain, **BFLOAT16 | {"attention_backend": "cpu"})

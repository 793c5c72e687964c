"""Compares families in GGUF files with transformers, and quantized blocks as well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files.expert_families import EXPERT_CONVERSIONS
from gguf_files.families import CONVERSIONS, write_family

from dovetail import LLM, SamplingParams
from dovetail.errors import ModelError
from parity.checkpoints import VOCAB_SIZE
from parity.commit_seed import commit_seed
from parity.family_checkpoints import make_model, usual_family

PROMPT_LEN = 150
"""Tokens, more than the sliding windows."""
TOLERANCE = 1e-4
BLOCK_TOLERANCE = 0.05
"""The tolerance for Q8_0, because the kernels round the inputs of linear layers to 8 bits."""
GEMMA_270M = {
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}
BLOCKS = ("gptneox", "phi3")
"""Families with fused weights, whose rows the loader divides and reorders as blocks."""


def log_probabilities(file: Path, prompt: list[int]) -> list[dict[int, float]]:
    """Return the log probabilities of all tokens at each position of the prompt but the first."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=VOCAB_SIZE)
    with LLM(
        str(file),
        dtype="float32",
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        max_model_len=256,
        max_logprobs=VOCAB_SIZE,
        num_gpu_blocks_override=40,
        num_threads=1,
        platform="cpu",
        plugin_options={"worker:cpu": {"packed_cache": "off"}},
    ) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    positions = output.prompt_logprobs[1:]
    return [{token: item.logprob for token, item in row.items()} for row in positions]


def largest_difference(name: str, folder: Path, type_: GGMLQuantizationType) -> float:
    conversion = CONVERSIONS[name]
    seed = commit_seed()[0]
    model = make_model(conversion.family, name, seed)
    file = write_family(conversion, model, folder / "model.gguf", type_)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB_SIZE, (PROMPT_LEN,), generator=generator)
    with torch.no_grad():
        expected_TV = model(prompt[None]).logits[0].log_softmax(-1)
    actual = log_probabilities(file, prompt.tolist())
    rows = [[row[token] for token in range(VOCAB_SIZE)] for row in actual]
    return float((torch.tensor(rows) - expected_TV[:-1]).abs().max())


@pytest.mark.costly
@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_family_in_a_gguf_file_agrees_with_transformers(name, tmp_path, record_property):
    difference = largest_difference(name, tmp_path, GGMLQuantizationType.F32)
    record_property("gguf", f"{name}: largest difference {difference:.1e}")
    assert difference <= TOLERANCE


@pytest.mark.parametrize("name", BLOCKS)
def test_fused_weights_of_quantized_blocks_agree_with_transformers(name, tmp_path):
    assert largest_difference(name, tmp_path, GGMLQuantizationType.Q8_0) <= BLOCK_TOLERANCE


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", EXPERT_CONVERSIONS)
def test_quantized_experts_agree_with_transformers_on_dequantized_weights(name, tmp_path):
    kind = GGMLQuantizationType.MXFP4 if name == "gpt-oss" else GGMLQuantizationType.Q8_0
    assert largest_difference(name, tmp_path, kind) <= TOLERANCE


@pytest.mark.costly
@pytest.mark.parametrize("name", ["mamba2", "qwen3next"])
def test_quantized_recurrent_layers_agree_with_transformers(name, tmp_path):
    assert largest_difference(name, tmp_path, GGMLQuantizationType.Q8_0) <= TOLERANCE


def test_query_norms_in_a_stablelm_file_are_rejected(tmp_path):
    conversion = CONVERSIONS["stablelm"]
    model = make_model(conversion.family, "stablelm", 0)
    norms = {"blk.0.attn_q_norm.weight": np.ones((4, 16), dtype=np.float32)}
    file = write_family(conversion, model, tmp_path / "model.gguf", extra=norms)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q_norm\.weight"):
        log_probabilities(file, [1, 2, 3])


@pytest.mark.soak
def test_a_file_with_the_shape_of_gemma_3_270m_agrees_with_transformers(tmp_path, monkeypatch):
    """The published file itself is not available offline; its vocabulary is shortened here."""
    monkeypatch.setitem(
        CONVERSIONS,
        "gemma3, 270m",
        replace(
            CONVERSIONS["gemma3"],
            family=usual_family("Gemma3", config="Gemma3TextConfig", **GEMMA_270M),
            keys={"attention.sliding_window": "sliding_window", "rope.freq_base": 1e6},
        ),
    )
    kind = GGMLQuantizationType.Q8_0
    assert largest_difference("gemma3, 270m", tmp_path, kind) <= 2 * BLOCK_TOLERANCE

"""GGUF files of models with experts: blocks in the native experts, and files that are rejected."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files.families import CONVERSIONS, write_family

from dovetail import LLM, SamplingParams
from dovetail.errors import ModelError, WeightError
from parity.checkpoints import VOCAB_SIZE
from parity.family_checkpoints import make_model

native_library = pytest.importorskip("dovetail_cpu.native_library")

MAX_SECONDS = 10.0
GATE = "blk.0.ffn_gate_exps.weight"
Change = Callable[[torch.nn.Module], None]


def write(
    name: str,
    folder: Path,
    *,
    keys: dict[str, Any] | None = None,
    change: Change | None = None,
    type_: GGMLQuantizationType = GGMLQuantizationType.F32,
    renamed: tuple[str, str] = ("", ""),
) -> Path:
    """Write a small model. keys: metadata. change: edits the model. renamed: a tensor, same length.

    A value None removes the key.
    """
    conversion = CONVERSIONS[name]
    model = make_model(conversion.family, name, 0)
    if change is not None:
        change(model)
    conversion = replace(conversion, keys={**conversion.keys, **(keys or {})})
    path = write_family(conversion, model, folder / "model.gguf", type_)
    if renamed[0]:
        path.write_bytes(path.read_bytes().replace(renamed[0].encode(), renamed[1].encode()))
    return path


def log_probabilities(path: Path, **options: Any) -> np.ndarray:
    """Return the log-probabilities of a prompt's tokens."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
    prompt = [int(x) for x in np.random.default_rng(1).integers(3, VOCAB_SIZE, 40)]
    with LLM(
        str(path),
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        num_threads=1,
        num_gpu_blocks_override=8,
        block_size=16,
        platform="cpu",
        plugin_options={"worker:cpu": {"packed_cache": "off"}},
        **options,
    ) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    rows = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    return np.array([row[token].logprob for token, row in rows])


@pytest.mark.costly
@pytest.mark.skipif(
    not native_library.probe_fast().usable, reason="there are no fast native kernels here"
)
@pytest.mark.parametrize("name", ["mixtral", "qwen2moe", "deepseek2, v3"])
def test_native_experts_compute_with_the_blocks_of_the_file(name, tmp_path, caplog):
    """The results differ from float32 only by the rounding of activations and of bfloat16."""
    path = write(name, tmp_path, type_=GGMLQuantizationType.Q8_0)
    with caplog.at_level(logging.INFO):
        actual = log_probabilities(path)
    # Without latent attention, only the embedding table; otherwise also k_b and v_b of 3 layers.
    count = 7 if name.startswith("deepseek2") else 1
    assert f"dequantized tensors: {count} of type Q8_0." in caplog.text
    exact = log_probabilities(path, dtype="float32", linear_method="torch")
    assert np.abs(actual - exact).mean() < 0.15 * exact.std()


@pytest.mark.costly
@pytest.mark.parametrize("name", ["deepseek2, v3", "gpt-oss"])
def test_the_experts_and_heads_of_a_file_are_sharded_over_two_ranks(name, tmp_path):
    """Half of an expert or of a head is not a whole number of blocks."""
    path = write(name, tmp_path, type_=GGMLQuantizationType.Q8_0)
    options = {"dtype": "float32", "linear_method": "torch"}
    expected = log_probabilities(path, **options)
    actual = log_probabilities(path, tensor_parallel_size=2, **options)
    assert np.abs(actual - expected).max() < 1e-4


def fewer_experts(model: torch.nn.Module) -> None:
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj[:5])


COUNTS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3moe", {"expert_count": 1}, "qwen3moe.expert_count is 1; it must be an integer from 2"),
    ("qwen3moe", {"expert_count": None}, "qwen3moe.expert_count is missing"),
    ("qwen3moe", {"expert_count": 2**31}, "qwen3moe.expert_count is 2147483648"),
    ("mixtral", {"expert_count": 4097}, "llama.expert_count is 4097; it must be"),
    ("mixtral", {"expert_count": True}, "llama.expert_count is True; it must be"),
    ("mixtral", {"expert_used_count": 6}, "llama.expert_used_count is 6; it must be an integer"),
    ("olmoe", {"expert_used_count": 0}, "olmoe.expert_used_count is 0; it must be an integer"),
    ("olmoe", {"expert_used_count": None}, "olmoe.expert_used_count is missing"),
    (
        "qwen2moe",
        {"expert_shared_feed_forward_length": 30_000_000},
        "blk.0.ffn_down_shexp.weight has the shape",
    ),
    (
        "deepseek2, v3",
        {"expert_shared_count": 30_000_000},
        "(deepseek2.expert_shared_count × expert_feed_forward_length) require 960000000 columns",
    ),
    (
        "deepseek2, v3",
        {"attention.q_lora_rank": 30_000_000},
        "(deepseek2.attention.q_lora_rank) require 30000000 rows",
    ),
    ("mixtral", {"expert_count": 4}, "blk.0.ffn_gate_inp.weight has the shape [5, 64]"),
    ("mixtral", {"expert_count": 4096}, "llama.expert_count 4096, embedding_length 64"),
    ("qwen3moe", {"expert_feed_forward_length": 2**31}, f"{GATE} has the shape [7, 32, 64]"),
    ("qwen2moe", {"expert_feed_forward_length": None}, "expert_feed_forward_length is missing"),
    ("qwen2moe", {"expert_shared_feed_forward_length": 0}, "shared_feed_forward_length is 0"),
    (
        "qwen2moe",
        {"expert_weights_norm": 1},
        "qwen2moe.expert_weights_norm is 1; it must be a bool",
    ),
    ("olmoe", {"block_count": 2**31}, "no router of layer 3 (blk.3.ffn_gate_inp.weight)"),
    ("llama4", {"interleave_moe_layer_step": 0}, "llama4.interleave_moe_layer_step is 0"),
    ("llama4", {"interleave_moe_layer_step": 1}, "no router of layer 0"),
    ("llama4", {"attention.sliding_window": 0}, "llama4.attention.sliding_window is 0"),
    ("deepseek2, v3", {"leading_dense_block_count": 0}, "no router of layer 0"),
    ("deepseek2, v3", {"expert_gating_func": 3}, "deepseek2.expert_gating_func is 3"),
    ("deepseek2, v3", {"attention.key_length_mla": 8}, "attention.key_length_mla is 8; it must be"),
    ("deepseek2, v3", {"attention.kv_lora_rank": None}, "attention.kv_lora_rank is missing"),
    ("deepseek2, v3", {"rope.scaling.yarn_log_multiplier": -1.0}, "yarn_log_multiplier is -1.0"),
    ("gemma", {"expert_count": 8}, "gemma with experts (gemma.expert_count) is not supported"),
]
"""Model, metadata, and a part of the error message."""


@pytest.mark.costly
@pytest.mark.parametrize(("name", "keys", "message"), COUNTS)
def test_the_error_for_invalid_expert_metadata_names_the_key(name, keys, message, tmp_path):
    path = write(name, tmp_path, keys=keys)
    start = time.monotonic()
    with pytest.raises(ModelError, match=re.escape(message)) as caught:
        log_probabilities(path)
    assert time.monotonic() - start < MAX_SECONDS
    assert "model.gguf" in str(caught.value)


def test_the_error_for_a_tensor_with_too_few_experts_names_it(tmp_path):
    path = write("qwen3moe", tmp_path, change=fewer_experts)
    with pytest.raises(
        ModelError, match=r"blk\.1\.ffn_down_exps\.weight has the shape \[5, 64, 32\]"
    ):
        log_probabilities(path)


def test_the_error_for_a_missing_router_names_it(tmp_path):
    names = ("blk.1.ffn_gate_inp.weight", "blk.1.ffn_gate_inq.weight")
    path = write("mixtral", tmp_path, renamed=names)
    with pytest.raises(ModelError, match=r"no router of layer 1 \(blk\.1\.ffn_gate_inp\.weight\)"):
        log_probabilities(path)


@pytest.mark.parametrize("leaf", ["ffn_down_shexp", "attn_q_a"])
def test_a_size_without_any_tensor_of_that_size_is_rejected(leaf, tmp_path):
    path = write("deepseek2, v3", tmp_path, renamed=(f"{leaf}.weight", f"{leaf}.weighs"))
    with pytest.raises(
        ModelError, match=rf"has no tensor {leaf}\.weight in any layer, .*deepseek2"
    ):
        LLM(str(path), skip_tokenizer_init=True)


def test_the_error_for_missing_experts_names_the_tensor(tmp_path):
    path = write("mixtral", tmp_path, renamed=("blk.1.ffn_up_exps", "blk.1.ffn_up_exqs"))
    with pytest.raises(WeightError, match=r"missing 1 weight \(blk\.1\.ffn_up_exps\.weight\)"):
        log_probabilities(path)


def test_unsupported_divisors_of_rotary_frequencies_are_rejected(tmp_path):
    conversion = CONVERSIONS["llama4"]
    rope = dict(conversion.family.fields["rope_parameters"], low_freq_factor=2.0)
    family = replace(
        conversion.family, fields={**conversion.family.fields, "rope_parameters": rope}
    )
    model = make_model(family, "llama4", 0)
    path = write_family(replace(conversion, family=family), model, tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"differ from those of Llama 3 .* and those of Llama 4"):
        log_probabilities(path)

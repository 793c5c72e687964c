"""GGUF files of recurrent models: damaged metadata and tensors are rejected."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf_files.families import CONVERSIONS, write_family

from dovetail import LLM
from dovetail.errors import ModelError
from parity.family_checkpoints import make_model

MAX_SECONDS = 5.0


def write(name, folder, keys=None, change=lambda model: None):
    conversion = CONVERSIONS[name]
    conversion = replace(conversion, keys={**conversion.keys, **(keys or {})})
    model = make_model(conversion.family, name, 0)
    change(model)
    return write_family(conversion, model, folder / "model.gguf")


def rejected(path, message):
    start = time.monotonic()
    with pytest.raises(ModelError, match=re.escape(message)):
        LLM(
            str(path),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=64,
            num_gpu_blocks_override=8,
            num_threads=1,
        )
    assert time.monotonic() - start < MAX_SECONDS


KEYS = [
    ("mamba2", {"ssm.inner_size": 96}, "inner_size 96 is not a multiple of mamba2.embedding"),
    ("mamba2", {"ssm.inner_size": 2**31}, "head_dim is 268435456"),
    ("mamba2", {"ssm.time_step_rank": 0}, "mamba2.ssm.time_step_rank is 0; it must be"),
    ("mamba2", {"ssm.time_step_rank": 7}, "mamba2.ssm.inner_size 128 is not a multiple of"),
    ("mamba2", {"ssm.group_count": 3}, "mamba2.ssm.time_step_rank 8 is not a multiple of"),
    ("mamba2", {"ssm.state_size": None}, "mamba2.ssm.state_size is missing"),
    ("mamba2", {"block_count": 2**31}, "has no tensor blk.2147483647.attn_norm.weight"),
    ("qwen3next", {"block_count": 2**31}, "has no tensor blk.2147483647.attn_norm.weight"),
    ("qwen3next", {"block_count": 0}, "has no tensor blk.-1.attn_norm.weight"),
    ("qwen3next", {"nextn_predict_layers": 4}, "has no tensor blk.-1.attn_norm.weight"),
    (
        "qwen3next",
        {"block_count": 4 + 10**9, "nextn_predict_layers": 10**9},
        "qwen3next.nextn_predict_layers is 1000000000; it must be an integer from 0 to 64",
    ),
    ("qwen3next", {"full_attention_interval": 0}, "qwen3next.full_attention_interval is 0"),
    ("qwen3next", {"full_attention_interval": 3}, "model.gguf"),
    ("qwen3next", {"ssm.inner_size": 4 << 20}, "linear_value_head_dim is 1048576"),
    ("qwen3next", {"expert_used_count": 0}, "qwen3next.expert_used_count is 0"),
]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "keys", "message"), KEYS)
def test_the_error_for_invalid_state_metadata_names_the_key(name, keys, message, tmp_path):
    rejected(write(name, tmp_path, keys=keys), message)


@pytest.mark.costly
@pytest.mark.parametrize("value", [0.0, 1.0, float("nan")])
def test_a_decay_that_is_not_negative_is_rejected(value, tmp_path):
    path = write("mamba2", tmp_path)
    data = bytearray(path.read_bytes())
    old = make_model(CONVERSIONS["mamba2"].family, "mamba2", 0).backbone.layers[1].mixer.A_log
    stored = (-torch.exp(old.detach())).numpy().tobytes()
    start = bytes(data).index(stored)
    data[start : start + 4] = np.float32(value).tobytes()
    path.write_bytes(bytes(data))
    rejected(path, "blk.1.ssm_a has values that are not below 0")


def test_multi_token_prediction_layers_are_not_loaded(tmp_path):
    """The metadata declares the last layer as a prediction layer, which the model lacks."""
    path = write("qwen3next", tmp_path, keys={"nextn_predict_layers": 1})
    with LLM(
        str(path),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        num_gpu_blocks_override=8,
        num_threads=1,
    ) as llm:
        assert llm.llm_engine.config.model.hf_config["num_hidden_layers"] == 3

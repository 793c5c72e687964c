"""Compares the frequencies of each type of rotary embedding with those of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dovetail_torch.layers.rope_frequencies import (
    ROPE_TYPES,
    read_rope_parameters,
    rope_frequencies,
)

HEAD_SIZE, LENGTH = 22, 512
DIVISORS = {
    name: [start + 0.3 * i for i in range(11)] for name, start in (("short", 1), ("long", 2))
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {"rope_type": "longrope", **{f"{name}_factor": value for name, value in DIVISORS.items()}}
CASES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": YARN,
    "yarn, temperature": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
    "yarn, factor of attention": {**YARN, "attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2},
    "longrope": LONG,
    "longrope, factor": {**LONG, "factor": 7.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("length", [100, LENGTH, 3 * LENGTH])
@pytest.mark.parametrize("name", CASES)
def test_rope_frequencies_agree_with_transformers(name, length):
    stated = CASES[name] | {"rope_theta": 5000.0}
    fields = {"head_dim": HEAD_SIZE, "max_position_embeddings": LENGTH}
    if stated["rope_type"] == "longrope":
        fields["original_max_position_embeddings"] = 128
    kind, config = stated["rope_type"], LlamaConfig(**fields, rope_parameters=dict(stated))
    expected_F, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    read = read_rope_parameters({**fields, "rope_parameters": stated})
    own_F, own_factor = rope_frequencies({**read, "max_model_len": length}, HEAD_SIZE)
    torch.testing.assert_close(own_F, expected_F, rtol=1e-5, atol=0)
    assert own_factor == pytest.approx(factor)


def test_every_rope_type_except_the_default_is_compared():
    assert {case["rope_type"] for case in CASES.values()} == ROPE_TYPES.keys() - {"default"}


@pytest.mark.parametrize(
    ("other", "fields", "name"),
    [("mrope", {"mrope_section": [2, 4, 5]}, "default"), ("su", LONG, "longrope")],
)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_alternative_names_of_a_rope_type_are_accepted(other, fields, name, key):
    plain = {"max_position_embeddings": LENGTH, "original_max_position_embeddings": 128}
    fields = {field: value for field, value in fields.items() if field != "rope_type"}
    own = read_rope_parameters({**plain, "rope_scaling": {**fields, key: other}})
    usual = read_rope_parameters({**plain, "rope_scaling": {**fields, "rope_type": name}})
    for length in (100, 300):
        own_F, factor = rope_frequencies({**own, "max_model_len": length}, HEAD_SIZE)
        expected_F, usual_factor = rope_frequencies({**usual, "max_model_len": length}, HEAD_SIZE)
        assert torch.equal(own_F, expected_F) and factor == usual_factor

"""max_model_len from config.json, for every rope type and both forms of rope parameters."""

import pytest

from dovetail.config.checkpoint_facts import stated_max_model_len


@pytest.mark.parametrize(
    ("hf_config", "expected", "words"),
    [
        ({}, 64, "max_position_embeddings"),
        ({"max_position_embeddings": None, "n_positions": 50}, 50, "n_positions"),
        ({"max_position_embeddings": 100, "n_positions": 50}, 50, "n_positions"),
        # Deepseek-Coder states only the scaled length, which is used if no other is known.
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 64, "max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, 64, "max_position"),
        # Vicuna 16k states the original and the scaled length.
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 256},
            256,
            "max_sequence_length",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "max_sequence_length": 32},
            64,
            "max_position_embeddings",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0},
                "original_max_position_embeddings": 64,
            },
            256,
            "original_max_position_embeddings times the factor 4 of linear",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
            64,
            "max_position_embeddings",
        ),
        ({"n_positions": 50, "rope_theta": 1e4}, 50, "n_positions"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": None}}, 64, "max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, 128, "factor 2 of dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64, "max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, 64, "max_position"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64, "max_position"),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            128,
            "original_max_position_embeddings times the factor 4 of yarn",
        ),
        (
            {
                "original_max_position_embeddings": 16,
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
            },
            64,
            "original_max_position_embeddings times the factor 4 of yarn",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1.5}}, 96, "factor 1.5 of yarn"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}}},
            64,
            "max_position_embeddings",
        ),
    ],
)
def test_max_model_len_is_read_from_config_json(hf_config: dict, expected: int, words: str) -> None:
    stated = stated_max_model_len({"max_position_embeddings": 64, **hf_config})
    assert stated is not None
    assert stated.tokens == expected <= stated.maximum
    assert words in stated.source

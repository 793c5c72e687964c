"""The metadata of files that `dovetail quantize` writes: what is kept, and what is rejected."""

from __future__ import annotations

import pytest
import torch

from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ConfigError, ModelError
from dovetail_quantize import round_trip
from dovetail_quantize.checkpoint import write_checkpoint
from dovetail_quantize.metadata import check_representable
from dovetail_quantize.round_trip import check_round_trip, read_back, read_shape

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CLASSES = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", EXPERTS),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
WINDOW = {"sliding_window": 1024, "use_sliding_window": True}
ABSENT = object()


def config_of(kind, **changes):
    """Return the fields of config.json of a small model, without those that are ABSENT."""
    architecture, own = CLASSES[kind]
    named = {"model_type": kind, "architectures": [architecture]}
    fields = {**BASE, **own, **named, **changes}
    return {name: value for name, value in fields.items() if value is not ABSENT}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("mistral", {"sliding_window": None}, {"sliding_window": None}),
        ("mistral", {"sliding_window": ABSENT}, {"sliding_window": 4096}),
        ("mistral", {"sliding_window": 1024}, {"sliding_window": 1024}),
        ("mixtral", {"sliding_window": 1024}, {"sliding_window": 1024}),
        ("llama", {"sliding_window": 512}, {"architectures": ["LlamaForCausalLM"]}),
        ("llama", {"attention_bias": True, "mlp_bias": True}, {"mlp_bias": True}),
        ("llama", {"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, {}),
        ("llama", {"rms_norm_eps": ABSENT}, {"rms_norm_eps": 1e-6}),
        ("mixtral", {"rms_norm_eps": None}, {"rms_norm_eps": 1e-5}),
        ("mixtral", {"num_local_experts": ABSENT}, {"num_local_experts": 8}),
        ("qwen2", {"rope_theta": ABSENT, "num_key_value_heads": None}, {"rope_theta": 1e4}),
        ("qwen2", {"rope_parameters": {**YARN, "rope_theta": 5e5}, "rope_theta": ABSENT}, {}),
        ("qwen2", {"rope_scaling": {**YARN, "beta_fast": 64.0, "beta_slow": 2}}, {}),
        ("qwen2", {"rope_scaling": {**YARN, "factor": None}}, {}),
        ("qwen2", {"sliding_window": 1024, "max_window_layers": 1}, {}),
        ("qwen3", {"head_dim": ABSENT}, {"head_dim": 128}),
        ("qwen3", {"attention_bias": True}, {"attention_bias": True}),
        ("qwen2_moe", {"qkv_bias": False, "num_experts": ABSENT}, {"qkv_bias": False}),
        ("qwen3_moe", {"norm_topk_prob": True}, {"norm_topk_prob": True}),
        ("qwen3_moe", {"num_experts": ABSENT, "num_experts_per_tok": None}, {"num_experts": 128}),
        ("qwen3_moe", {"moe_intermediate_size": ABSENT}, {"norm_topk_prob": False}),
        ("qwen3_moe", {"sliding_window": 1024}, {}),
        ("qwen3_moe", WINDOW, {"sliding_window": 1024}),
        ("qwen3_moe", {"attention_bias": True}, {"attention_bias": True}),
    ],
)
def test_a_file_describes_the_same_model_as_config_json(kind, changes, expected, tmp_path):
    config = config_of(kind, **changes)
    check_representable(
        ModelDirectory(path=tmp_path, config=config, generation_config={}), method="rtn"
    )
    check_round_trip(config)
    read = read_back(config, read_shape(config))
    assert {name: read[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2", {**WINDOW, "max_window_layers": 1}, r"windows is \(0, 1024\), but \(0, 0\)"),
        ("qwen3", {**WINDOW, "layer_types": ["full_attention", "sliding_attention"]}, "windows is"),
        ("qwen2", {"rope_scaling": {**YARN, "attention_factor": 1.5}}, r"ropes\[0\].parameters is"),
        ("qwen2", {"rope_scaling": {**YARN, "truncate": False}}, r"ropes\[0\].parameters is"),
        ("qwen2", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, "ropes"),
        ("qwen2", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' cannot be"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 2.0}}, "divisors in rope_freqs"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlps\[0\]"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "model_max_length": 65536},
            r"max_model_len is \(65536, 65536\), but \(32768, 65536\)",
        ),
    ],
)
def test_a_model_that_a_file_cannot_describe_is_rejected_with_the_field(kind, changes, message):
    with pytest.raises(ModelError, match=message):
        check_round_trip(config_of(kind, **changes))


def test_a_different_default_of_the_file_is_found(monkeypatch):
    """The defaults of the engine may change, and those of this command could be forgotten."""
    monkeypatch.setattr("dovetail_quantize.metadata._EPS", 1e-4)
    with pytest.raises(ModelError, match=r"describe it: norm\.eps is 1e-06, but 0\.0001 in"):
        check_round_trip(config_of("llama", rms_norm_eps=None))


@pytest.mark.parametrize(
    ("changes", "generation_config", "message"),
    [
        ({"max_position_embeddings": None}, {}, "without max_position_embeddings"),
        ({}, {"eos_token_id": [1, 2, 3, 4]}, "4 end-of-sequence tokens.*at most 3"),
    ],
)
def test_a_missing_length_and_too_many_end_tokens_are_rejected_before_the_work_begins(
    changes, generation_config, message, tmp_path
):
    directory = ModelDirectory(
        path=tmp_path, config=config_of("llama", **changes), generation_config=generation_config
    )
    with pytest.raises(ModelError, match=message):
        check_representable(directory, method="rtn")


def test_a_model_class_without_a_described_shape_is_rejected(monkeypatch):
    class Plain:
        pass

    monkeypatch.setattr(round_trip.PluginRegistry, "load", lambda *arguments: Plain)
    with pytest.raises(ModelError, match=r"its class .*Plain has no `read_shape`"):
        check_round_trip(config_of("llama"))


def test_a_temporary_file_that_cannot_be_written_is_a_typed_error(monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(round_trip, "_write_header", fail)
    with pytest.raises(ConfigError, match="temporary file cannot be written: No space left"):
        check_round_trip(config_of("llama"))


def test_a_saved_llama_3_has_the_divisors_of_its_frequencies(tmp_path):
    config = config_of("llama", rope_scaling=LLAMA3, tie_word_embeddings=True)
    tensors = {
        f"model.{name}.weight": ("F32", torch.zeros(*shape))
        for name, shape in {
            "embed_tokens": (64, 64),
            "layers.0.input_layernorm": (64,),
            "layers.1.input_layernorm": (64,),
        }.items()
    }
    original = ModelDirectory(path=tmp_path, config=config, generation_config={"eos_token_id": 3})
    write_checkpoint(tmp_path, original, tensors)
    saved = ModelDirectory.open(tmp_path / "model.gguf")
    assert saved.config["rope_scaling"] == LLAMA3
    assert saved.generation_config == {"eos_token_id": (3,)}

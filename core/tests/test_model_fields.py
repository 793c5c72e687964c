"""config.json and generation_config.json: errors for wrong types and ranges name the field."""

import json

import pytest

from dovetail.config import EngineArgs
from dovetail.config.model_directory import ModelDirectory
from dovetail.config.model_fields import check_model_fields
from dovetail.errors import ModelError

PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "eos_token_id": [1, 2],
    "pad_token_id": -1,
    "torch_dtype": "bfloat16",
}
INTEGERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
    "max_window_layers",
)
NUMBERS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
TEXTS = ("hidden_act", "model_type", "torch_dtype")
ROPE_NUMBERS = ("factor", "low_freq_factor", "attention_factor", "beta_fast", "mscale")
NO_INTEGERS = (2**70, -(2**70), 2**33, -2, "8", 8.0, True, {}, [], ["8"])
NO_NUMBERS = ("1", True, [], {}, float("nan"), float("inf"), -1, 2**200)
CASES = [
    *((name, value) for name in INTEGERS for value in NO_INTEGERS),
    *((name, value) for name in NUMBERS for value in NO_NUMBERS),
    *((name, value) for name in FLAGS for value in ("true", 1, [], {})),
    *((name, value) for name in TEXTS for value in (1, True, [], {}, "", "a" * 300)),
    ("num_hidden_layers", 5000),
    *(("layer_types", value) for value in ("full_attention", 3, {}, [1], [None])),
    *(("rope_scaling", value) for value in ("yarn", 3, True, ["yarn"])),
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    return tmp_path


def test_an_ordinary_config_is_valid_and_null_counts_as_a_missing_field():
    check_model_fields(PLAIN)
    check_model_fields(dict.fromkeys([*INTEGERS, *NUMBERS, *FLAGS, *TEXTS, "rope_scaling"]))


def test_fields_of_other_architectures_are_accepted():
    check_model_fields({"intermediate_size": [64, 128], "num_key_value_heads": (1, 2)})
    check_model_fields({"time_step_limit": [0.0, float("inf")], "anything": 2**70})
    check_model_fields({"text_config": {"hidden_size": 32}, "num_experts": 0})


@pytest.mark.costly
@pytest.mark.parametrize(("name", "value"), CASES)
def test_the_error_for_an_invalid_config_value_names_the_field(name, value):
    for config, index in (({name: value}, name), ({"text_config": {name: value}}, name)):
        with pytest.raises(ModelError, match=rf"config\.json: (text_config\.)?{index} is "):
            check_model_fields(PLAIN | config)


@pytest.mark.parametrize("table", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ROPE_NUMBERS)
def test_rope_parameters_are_checked_in_both_forms_and_per_layer_type(table, name):
    for value in NO_NUMBERS:
        for config in ({name: value}, {"full_attention": {name: value}}):
            with pytest.raises(ModelError, match=rf"{table}\.(full_attention\.)?{name} is "):
                check_model_fields({table: config})


@pytest.mark.parametrize("value", [2**70, "wide"])
def test_config_files_and_overrides_are_checked_before_the_engine_starts(folder, value):
    with pytest.raises(ModelError, match=r"config\.json: hidden_size is"):
        EngineArgs(model=folder, hf_overrides={"hidden_size": value}).create_engine_config()
    (folder / "config.json").write_text(json.dumps(PLAIN | {"hidden_size": value}))
    with pytest.raises(ModelError, match=r"config\.json: hidden_size is"):
        ModelDirectory.open(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 2**70),
        ("max_new_tokens", "many"),
        ("top_p", 2),
        ("top_k", 1.5),
        ("temperature", [1]),
        ("repetition_penalty", {}),
        ("min_p", True),
    ],
)
def test_the_error_for_an_invalid_sampling_default_names_file_and_field(folder, field, value):
    (folder / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ModelError, match=rf"generation_config\.json: {field} is "):
        EngineArgs(model=folder).create_engine_config()


@pytest.mark.parametrize("value", [2**33, 2**31, [1, 2**31], -1, "2", 1.0, True, [[1]], {}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_invalid_eos_token_id_is_rejected_before_startup(folder, file, value):
    stated = PLAIN if file == "config.json" else {}
    (folder / file).write_text(json.dumps({**stated, "eos_token_id": value}))
    with pytest.raises(ModelError, match=rf"eos_token_id.* {file}|{file}: eos_token_id"):
        EngineArgs(model=folder).create_engine_config()

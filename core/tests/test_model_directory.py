import json
from pathlib import Path

import pytest

from dovetail.config import ModelDirectory, default_sampling_params, eos_token_ids
from dovetail.errors import ConfigError, ModelError
from dovetail.plugins import PluginPolicy, PluginRegistry

CONFIG = {"architectures": ["LlamaForCausalLM"], "rope": {"list": [1, 2]}}


def make(path: Path, config: object = CONFIG, generation: object = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        text = generation if isinstance(generation, str) else json.dumps(generation)
        (path / "generation_config.json").write_text(text)
    return path


def rejection(path: object, **options: object) -> str:
    with pytest.raises(ModelError) as caught:
        ModelDirectory.open(path, **options)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    return message


def test_a_model_directory_is_frozen(tmp_path: Path) -> None:
    directory = ModelDirectory.open(make(tmp_path / "tiny", generation={"top_k": 5}))
    assert directory.path == tmp_path / "tiny"
    assert directory.architecture == "LlamaForCausalLM"
    assert directory.config == {"architectures": ("LlamaForCausalLM",), "rope": {"list": (1, 2)}}
    assert directory.generation_config == {"top_k": 5}
    assert directory.notes == ()
    with pytest.raises(TypeError, match="frozen"):
        directory.config["architectures"] = []
    with pytest.raises(TypeError, match="frozen"):
        directory.config["rope"].update(list=[])


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    assert ModelDirectory.open("tiny").path == tmp_path / "tiny"


def test_generation_config_may_be_absent(tmp_path: Path) -> None:
    assert ModelDirectory.open(make(tmp_path / "tiny")).generation_config == {}


def test_hf_overrides_replace_complete_keys(tmp_path: Path) -> None:
    path = make(tmp_path / "tiny")
    directory = ModelDirectory.open(path, hf_overrides={"rope": {"factor": 2}, "vocab_size": 7})
    assert directory.config["rope"] == {"factor": 2}
    assert directory.config["vocab_size"] == 7


def test_the_error_for_a_missing_path_suggests_a_similar_path(tmp_path: Path) -> None:
    make(tmp_path / "tiny-llama")
    message = rejection(tmp_path / "tiny-lama")
    assert "tiny-lama' does not exist" in message
    assert "Did you mean 'tiny-llama'?" in message
    assert "local model directory" in message


def test_a_path_in_a_missing_directory_is_reported(tmp_path: Path) -> None:
    assert "does not exist" in rejection(tmp_path / "no" / "where")


def test_the_error_for_a_hub_name_states_how_to_install_the_missing_model_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    without = PluginRegistry(policy=PluginPolicy(deny=("model_source:hub@dovetail-model-sources",)))
    message = rejection("meta-llama/Llama-3.2-1B", plugins=without)
    assert "'meta-llama/Llama-3.2-1B'" in message
    assert "pip install 'dovetail-model-sources[hub]'" in message


def test_a_local_path_has_no_revision(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision='main' is not valid for the local path"):
        ModelDirectory.open(make(tmp_path / "tiny"), revision="main")


def test_a_name_similar_to_a_directory_is_treated_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    make(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    message = rejection("models/tinny")
    assert "does not exist" in message
    assert "Did you mean 'tiny'?" in message


def test_the_error_for_a_file_path_suggests_its_directory(tmp_path: Path) -> None:
    file = make(tmp_path / "tiny") / "config.json"
    message = rejection(file)
    assert "is a file" in message
    assert repr(str(tmp_path / "tiny")) in message


@pytest.mark.parametrize("path", ["a\0b", "x" * 5000])
def test_invalid_model_paths_are_rejected(path: str) -> None:
    assert "does not exist" in rejection(path)


def test_a_device_and_a_link_to_a_missing_file_are_named_as_such(tmp_path: Path) -> None:
    assert "'/dev/zero' is not a regular file." in rejection(Path("/dev/zero"))
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    assert "is a link to a missing file." in rejection(tmp_path / "link")


def test_a_directory_without_config_json_is_rejected(tmp_path: Path) -> None:
    message = rejection(tmp_path)
    assert "has no config.json" in message
    assert "specify the directory" in message


@pytest.mark.parametrize("text", ["{", "", "\xff", "[" * 100_000])
def test_the_error_for_bad_json_names_the_file(tmp_path: Path, text: str) -> None:
    path = make(tmp_path / "tiny")
    (path / "config.json").write_bytes(text.encode("latin-1"))
    message = rejection(path)
    assert str(path / "config.json") in message
    assert "not valid JSON" in message


def test_config_json_must_be_an_object(tmp_path: Path) -> None:
    message = rejection(make(tmp_path / "tiny", config="[1]"))
    assert "must contain a JSON object, got list" in message


def test_the_error_for_a_bad_generation_config_names_the_file(tmp_path: Path) -> None:
    message = rejection(make(tmp_path / "tiny", generation="{"))
    assert "generation_config.json is not valid JSON" in message


@pytest.mark.parametrize("names", [[], None, "Llama", [1], [""], {}])
def test_invalid_architectures_are_rejected(tmp_path: Path, names: object) -> None:
    path = make(tmp_path / "tiny", config={"architectures": names})
    message = rejection(path)
    assert f"architectures={names!r}" in message
    assert "hf_overrides" in message
    opened = ModelDirectory.open(path, hf_overrides={"architectures": ["LlamaForCausalLM"]})
    assert opened.architecture == "LlamaForCausalLM"


def test_missing_architectures_are_rejected(tmp_path: Path) -> None:
    assert "has no architectures" in rejection(make(tmp_path / "tiny", config={}))


def test_auto_map_is_ignored_with_a_note_and_rejected_with_trust_remote_code(
    tmp_path: Path,
) -> None:
    path = make(tmp_path / "tiny", config={**CONFIG, "auto_map": {"AutoModel": "m.M"}})
    (note,) = ModelDirectory.open(path).notes
    assert "auto_map" in note and "ignored" in note
    message = rejection(path, trust_remote_code=True)
    assert "never run" in message and "plugin" in message


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, {}, {2}),
        ({"eos_token_id": [2, 3]}, {}, {2, 3}),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 6]}, {5, 6}),
        ({"eos_token_id": 2}, {"eos_token_id": None}, {2}),
        ({"eos_token_id": 2}, {"eos_token_id": []}, {2}),
        ({"eos_token_id": 0}, {}, {0}),
        ({}, {}, set()),
    ],
)
def test_eos_token_ids_are_read_from_config_and_generation_config(
    config: dict, generation: dict, expected: set[int]
) -> None:
    assert eos_token_ids(config, generation) == frozenset(expected)


@pytest.mark.parametrize("value", ["2", -1, True, 2.0, [2, None], {"id": 2}])
def test_invalid_eos_token_ids_are_rejected(value: object) -> None:
    with pytest.raises(ModelError, match=r"eos_token_id=.* of config\.json must be"):
        eos_token_ids({"eos_token_id": value}, {})


def test_default_sampling_params_are_read_from_generation_config() -> None:
    stated = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": None,
        "repetition_penalty": 1.1,
        "max_new_tokens": 99,
        "do_sample": False,
        "eos_token_id": 2,
    }
    assert default_sampling_params(stated) == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 50,
        "repetition_penalty": 1.1,
        "max_tokens": 99,
    }
    assert default_sampling_params({}) == {}


def test_default_sampling_params_out_of_bounds_are_rejected() -> None:
    with pytest.raises(ModelError, match=r"top_p=1\.5 must be"):
        default_sampling_params({"top_p": 1.5})

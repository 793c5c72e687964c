"""Models by name: model source plugins, and model files that a model format plugin reads."""

from __future__ import annotations

import json
import sys

import pytest

from dovetail.config import EngineArgs, ModelDirectory
from dovetail.config.model_sources import (
    CACHE_VARIABLE,
    find_model,
    local_models,
    model_cache_dir,
    source_names,
)
from dovetail.errors import ModelError, PluginError
from dovetail.plugins import PluginRegistry
from dovetail.plugins.resolving.plugin_policy import PluginPolicy

SOURCES = """
from pathlib import Path
from dovetail.errors import ModelError
from dovetail.interfaces import LocalModel
from dovetail_devkit.fakes.model_source import FakeModelSource

class One(FakeModelSource):
    def find(self, argument):
        if argument:
            raise ModelError("it takes no argument")
        return Path(__file__).parent.parent / "weights"
    def fetch(self, argument):
        return self.find(argument)
    def local_models(self):
        return [LocalModel(name="tiny-toy", path=self.find(""))]

class Broken(FakeModelSource):
    def fetch(self, argument):
        raise OSError("the disk is full")
    def local_models(self):
        raise OSError("the disk is full")

class Wrong(FakeModelSource):
    def fetch(self, argument):
        return 7
"""
ENTRIES = {
    "model_source": {
        "tiny-toy": ".parts:One",
        "broken-toy": ".parts:Broken",
        "wrong-toy": ".parts:Wrong",
        "absent-toy": "no_such_toy_package:Source",
        "fake": "dovetail_devkit.fakes.model_source:FakeModelSource",
    },
    "model_format": {"fake": "dovetail_devkit.fakes.model_format:FakeModelFormat"},
}


@pytest.fixture
def site(plugin_site, tmp_path, monkeypatch):
    """Install five model sources and a model format."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = plugin_site.path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    plugin_site.add("toy", ENTRIES, parts=SOURCES)
    return plugin_site


def rejection(name, **options):
    with pytest.raises((ModelError, PluginError)) as caught:
        ModelDirectory.open(name, **options)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    return message


def test_the_name_of_a_model_source_selects_its_model(site):
    assert ModelDirectory.open("tiny-toy").path == site.path / "weights"
    config = EngineArgs("tiny-toy").create_engine_config()
    assert config.model.model_dir == config.model.tokenizer_dir == site.path / "weights"
    assert config.model.served_model_name == "tiny-toy"


def test_a_model_source_receives_its_argument_and_fetches_the_model(site, tmp_path):
    assert find_model("fake:small", PluginRegistry(), fetch=False) is None
    assert ModelDirectory.open("fake:small").path == tmp_path / "cache/fake/small"
    assert find_model("fake:small", PluginRegistry(), fetch=False) is not None
    assert "letters and digits" in rejection("fake:../x")


def test_a_local_directory_takes_precedence_over_a_source(site, tmp_path, monkeypatch):
    own = tmp_path / "own" / "tiny-toy"
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"architectures": ["MistralForCausalLM"]}')
    monkeypatch.chdir(own.parent)
    assert ModelDirectory.open("tiny-toy").path == own


def test_listing_model_names_does_not_import_plugins(site):
    assert {"tiny-toy", "broken-toy"} <= set(source_names(PluginRegistry()))
    assert "'tiny-toy'" in rejection("tiny-tyo")
    assert "toy.parts" not in sys.modules


def test_the_error_for_an_unknown_model_name_lists_the_sources(site):
    report = rejection("zzzzzz")
    assert "does not exist" in report
    for name in ("absent-toy", "broken-toy", "tiny-toy"):
        assert name in report


def test_a_path_is_not_treated_as_a_model_name(site):
    assert "does not exist" in rejection("./tiny-toy")


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("broken-toy", "disk is full"),
        ("absent-toy", "no_such"),
        ("wrong-toy", "int"),
        ("tiny-toy:x", "no argument"),
    ],
)
def test_the_error_for_a_model_source_that_fails_names_it(site, name, cause):
    report = rejection(name)
    assert name.partition(":")[0] in report or "argument" in report
    assert cause in report


def test_plugin_rules_apply_to_model_sources(site):
    for policy in (
        PluginPolicy(no_plugins=True),
        PluginPolicy(deny=("model_source:tiny-toy@toy",)),
    ):
        registry = PluginRegistry(policy=policy)
        assert "tiny-toy" not in source_names(registry)
        assert "does not exist" in rejection("tiny-toy", plugins=registry)
    with pytest.raises(ModelError, match="does not exist"):
        EngineArgs("tiny-toy", no_plugins=True).create_engine_config()


def test_the_list_of_local_models_skips_sources_that_fail(site, caplog):
    by_name = {model.name for _, model in local_models(PluginRegistry())}
    assert "tiny-toy" in by_name and "demo" in by_name
    assert "broken-toy" in caplog.text and "absent-toy" in caplog.text


def test_the_model_cache_directory_is_read_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "mine"))
    assert model_cache_dir() == tmp_path / "mine"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache_dir() == tmp_path / "dovetail/models"


# --- model files -------------------------------------------------------------------------------


@pytest.fixture
def model_file(site, tmp_path):
    """A file that the model format `fake` reads."""
    path = tmp_path / "folder" / "one.fake"
    path.parent.mkdir()
    path.write_text(json.dumps({"architectures": ["FakeModel"], "vocab_size": 256}))
    return path


def test_the_file_ending_selects_the_model_format(model_file):
    actual = ModelDirectory.open(model_file, hf_overrides={"vocab_size": 300})
    assert actual.path == model_file
    assert actual.architecture == "FakeModel" and actual.config["vocab_size"] == 300
    config = EngineArgs(model_file).create_engine_config()
    assert config.model.defaults["load.load_format"] == "dummy"
    assert config.model.tokenizer_dir == model_file


def test_a_directory_with_one_model_file_selects_that_file(model_file):
    assert ModelDirectory.open(model_file.parent).path == model_file
    (model_file.parent / "two.fake").write_text("{}")
    message = rejection(model_file.parent)
    assert "has no config.json, but it contains 2 files *.fake." in message
    assert repr(str(model_file)) in message


def test_config_json_takes_precedence_over_model_files(model_file):
    (model_file.parent / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert ModelDirectory.open(model_file.parent).path == model_file.parent


def test_the_error_for_config_json_without_safetensors_names_the_model_file(model_file):
    folder = model_file.parent
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ModelError) as caught:
        EngineArgs(folder).create_engine_config()
    expected = f"{folder} has config.json, but no *.safetensors files; it contains 1 file *.fake."
    assert str(caught.value).startswith(expected)
    assert repr(str(model_file)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
    EngineArgs(folder, load_format="dummy").create_engine_config()
    (folder / "model.safetensors").touch()
    ModelDirectory.open(folder).check_weights(PluginRegistry())


def test_the_error_for_an_unknown_file_ending_lists_the_formats(model_file):
    other = model_file.with_suffix(".onnx")
    other.write_bytes(b"x")
    assert "*.fake" in rejection(other) and "no installed model format" in rejection(other)
    assert "perhaps" not in rejection(other)
    (other.parent / "config.json").write_text("{}")
    assert f"perhaps {str(other.parent)!r}" in rejection(other)


def test_the_error_for_a_damaged_model_file_names_it(model_file):
    model_file.write_text("{")
    assert "one.fake" in rejection(model_file)


def test_a_model_file_that_names_code_is_rejected(model_file):
    model_file.write_text('{"architectures": ["os:system"]}')
    assert "installed model" in rejection(model_file)


def test_tokenizer_mode_keeps_its_default_if_the_user_gives_a_tokenizer(model_file, tmp_path):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    config = EngineArgs(model_file, tokenizer=tokenizer).create_engine_config()
    assert dict(config.model.defaults) == {"load.load_format": "dummy"}

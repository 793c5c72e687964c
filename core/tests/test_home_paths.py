"""Paths that start with "~": an unknown user is an error that names the option."""

from __future__ import annotations

import pytest

from dovetail.cli.engine_options import EngineOptions, engine_args
from dovetail.cli.random_checkpoint import write_random_checkpoint
from dovetail.cli.terminal import read_text_file
from dovetail.config import EngineArgs, ModelDirectory
from dovetail.config.model_sources import CACHE_VARIABLE, model_cache_dir
from dovetail.errors import ConfigError, ModelError

UNKNOWN = "~no-such-user/x"


def test_a_model_below_the_home_of_an_unknown_user_does_not_exist():
    message = f"model='{UNKNOWN}' does not exist"
    with pytest.raises(ModelError, match=message):
        ModelDirectory.open(UNKNOWN)
    with pytest.raises(ModelError, match=message):
        engine_args(EngineOptions(model=UNKNOWN))


@pytest.mark.costly
@pytest.mark.parametrize("option", ["tokenizer", "generation_config"])
def test_an_option_with_the_home_of_an_unknown_user_is_rejected(option, tmp_path):
    with pytest.raises(ConfigError, match=f"{option}='{UNKNOWN}'"):
        EngineArgs(
            write_random_checkpoint(tmp_path / "model"), **{option: UNKNOWN}
        ).create_engine_config()


def test_a_text_file_of_an_unknown_user_cannot_be_read():
    with pytest.raises(ConfigError, match=f"--prompts-file {UNKNOWN} cannot be read"):
        read_text_file("--prompts-file", UNKNOWN)


def test_the_model_cache_of_an_unknown_user_is_rejected(monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, UNKNOWN)
    with pytest.raises(ConfigError, match=f"{CACHE_VARIABLE}='{UNKNOWN}': the home directory"):
        model_cache_dir()


def test_paths_below_the_own_home_are_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, "~/models")
    assert model_cache_dir() == tmp_path / "models"
    (tmp_path / "prompts").write_text("one\n")
    assert read_text_file("--prompts-file", "~/prompts") == "one\n"

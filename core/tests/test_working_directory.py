"""Every entry point raises a typed error if the working directory is deleted or unusable."""

import os
from contextlib import chdir

import pytest

from dovetail import LLM, AsyncLLM, EngineArgs
from dovetail.cli import main
from dovetail.config import ModelDirectory
from dovetail.engine.choice import explain_choice
from dovetail.engine.start import start_engine
from dovetail.errors import ConfigError
from dovetail.plugins import PluginPolicy, PluginRegistry
from dovetail.plugins.working_directory import check_working_directory
from dovetail_devkit.contexts import SMALL_ENGINE, write_fake_config
from dovetail_devkit.doctor import BROKEN
from dovetail_devkit.doctor.surroundings import check_environment


@pytest.fixture
def model(tmp_path):
    return write_fake_config(tmp_path)


@pytest.fixture
def deleted(tmp_path):
    """Change to a directory and delete it."""
    folder = tmp_path / "deleted"
    folder.mkdir()
    with chdir(folder):
        folder.rmdir()
        yield


ENTRIES = {
    "LLM": lambda model: LLM(model, **SMALL_ENGINE),
    "LLM in a process": lambda model: LLM(model, engine_process=True, **SMALL_ENGINE),
    "LLM by a relative path": lambda model: LLM("model"),
    "LLM by a short name": lambda model: LLM("demo"),
    "AsyncLLM": lambda model: AsyncLLM.from_engine_args(EngineArgs(model)),
    "EngineArgs": lambda model: EngineArgs(model).create_engine_config(),
    "ModelDirectory": lambda model: ModelDirectory.open("model"),
    "explain": lambda model: explain_choice("scheduler"),
    "a plugin in a file": lambda model: PluginRegistry(
        policy=PluginPolicy(trust_local_code=True)
    ).load("policy", "./mine.py:Mine"),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_deleted_working_directory_raises_a_typed_error(entry, model, deleted):
    with pytest.raises(ConfigError, match=r"working directory .* was deleted\.\nChange to"):
        ENTRIES[entry](model)


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "--model", "demo", "hi"],
        ["bench", "latency", "--model", "demo"],
        ["demo"],
        ["plugins", "explain", "attention"],
        ["plugins", "new", "policy", "mine_own"],
        ["plugins", "show", "policy:./mine.py:Mine"],
        ["lab", "replay", "log"],
    ],
    ids=" ".join,
)
def test_commands_report_a_deleted_directory_in_three_lines(command, deleted, capsys):
    assert main(command) == 2
    message = capsys.readouterr().err
    assert message.startswith("dovetail: ") and len(message.splitlines()) <= 3


def test_commands_that_need_no_directory_work_in_a_deleted_directory(deleted, capsys):
    assert main(["plugins", "list"]) == 0
    actual = [item for item in check_environment() if item.subject == "working directory"]
    assert [item.verdict for item in actual] == [BROKEN]


def test_a_directory_deleted_after_the_configuration_raises_a_typed_error(model, tmp_path):
    config = EngineArgs(model, **SMALL_ENGINE).create_engine_config()
    folder = tmp_path / "deleted"
    folder.mkdir()
    with chdir(folder):
        folder.rmdir()
        with pytest.raises(ConfigError, match="was deleted"):
            start_engine(config)


def test_a_working_directory_with_a_long_path_is_rejected(model, tmp_path):
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(tmp_path)
        for _ in range(20):
            os.mkdir("d" * 200)
            os.chdir("d" * 200)
        with pytest.raises(ConfigError, match=r"path of 4\d\d\d bytes; the maximum is 3840"):
            LLM(model, **SMALL_ENGINE)
    finally:
        os.fchdir(before)
        os.close(before)


def test_an_inaccessible_working_directory_raises_a_typed_error(monkeypatch):
    def reject(path):
        raise PermissionError(13, "Permission denied")

    check_working_directory()
    monkeypatch.setattr(os, "stat", reject)
    with pytest.raises(ConfigError, match="cannot be used: Permission denied"):
        check_working_directory()

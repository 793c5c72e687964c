"""Tests of `dovetail plugins new`. The written packages are tested in `test_scaffold`."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main


def test_the_command_prints_the_next_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "platform", "my_box"]) == 0
    output = capsys.readouterr().out
    assert (tmp_path / "my_box/src/my_box/platform.py").is_file()
    assert "pip install -e ./my_box" in output
    assert "pytest --dovetail-plugin platform:my_box --dovetail-plugin worker:my_box" in output


def test_the_out_option_sets_the_directory(tmp_path, capsys):
    assert main(["plugins", "new", "policy", "mine", "--out", str(tmp_path), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["folder"] == str(tmp_path / "mine")
    assert output["plugins"] == ["policy:mine"]
    assert all((tmp_path / "mine" / path).is_file() for path in output["files"])


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["polcy", "mine"], "Did you mean 'policy'"),
        (["policy", "no-name"], "letters"),
    ],
)
def test_invalid_arguments_give_a_short_message(arguments, output, tmp_path, capsys):
    assert main(["plugins", "new", *arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert output in error and len(error.splitlines()) <= 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("folder", "output"), [("~no-such-user", "home directory"), ("x" * 300, "name too long")]
)
def test_an_output_directory_that_cannot_exist_gives_a_short_message(folder, output, capsys):
    assert main(["plugins", "new", "policy", "mine", "--out", folder]) == 2
    error = capsys.readouterr().err
    assert output in error and len(error.splitlines()) <= 3

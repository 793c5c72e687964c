"""`dovetail plugins new`: what it says and what it writes; the packages are tested elsewhere."""

from __future__ import annotations

import json

import pytest

from dovetail.cli import main


def test_it_says_what_to_do_next(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "new", "platform", "my_box"]) == 0
    told = capsys.readouterr().out
    assert (tmp_path / "my_box/src/my_box/platform.py").is_file()
    assert "pip install -e ./my_box" in told
    assert "pytest --dovetail-plugin platform:my_box --dovetail-plugin worker:my_box" in told


def test_it_writes_to_the_given_folder(tmp_path, capsys):
    assert main(["plugins", "new", "policy", "mine", "--out", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["folder"] == str(tmp_path / "mine")
    assert told["plugins"] == ["policy:mine"]
    assert all((tmp_path / "mine" / path).is_file() for path in told["files"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["polcy", "mine"], "Did you mean 'policy'"),
        (["proposer", "mine"], "dovetail.interfaces.proposer"),
        (["policy", "no-name"], "letters"),
    ],
)
def test_mistakes_are_reported_briefly(arguments, told, tmp_path, capsys):
    assert main(["plugins", "new", *arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert told in error and len(error.splitlines()) <= 3
    assert not list(tmp_path.iterdir())

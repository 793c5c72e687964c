"""Short names of models in installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.config import EngineArgs, ModelDirectory
from dovetail.config.installed_checkpoints import installed_checkpoint_names
from dovetail.errors import ModelError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on sys.path with the installed checkpoints "tiny-toy" and "broken-toy"."""
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    source = (
        f"def model_dir():\n    return {str(folder)!r}\n\ndef broken():\n    raise OSError('x')\n"
    )
    (tmp_path / "toy_model_package.py").write_text(source)
    install(
        tmp_path,
        "toy",
        "tiny-toy = toy_model_package:model_dir\nbroken-toy = toy_model_package:broken\n"
        "absent-toy = no_such_toy_package:model_dir\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_model_package", raising=False)
    return tmp_path


def install(site: Path, name: str, entries: str) -> None:
    info = site / f"{name}-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text(f"[dovetail.checkpoint]\n{entries}")


def refusal(name: str) -> str:
    with pytest.raises(ModelError) as caught:
        ModelDirectory.open(name)
    message = str(caught.value)
    assert len(message.splitlines()) <= 3
    return message


def test_an_installed_name_resolves_to_its_directory(site: Path) -> None:
    assert ModelDirectory.open("tiny-toy").path == site / "weights"
    config = EngineArgs("tiny-toy").create_engine_config()
    assert config.model.model_dir == config.model.tokenizer_dir == site / "weights"
    assert config.model.served_model_name == "tiny-toy"


def test_a_local_directory_takes_precedence_over_an_installed_name(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = site / "own" / "tiny-toy"
    own.mkdir(parents=True)
    (own / "config.json").write_text('{"architectures": ["MistralForCausalLM"]}')
    monkeypatch.chdir(own.parent)
    assert ModelDirectory.open("tiny-toy").path == own


def test_resolving_names_imports_nothing(site: Path) -> None:
    assert {"tiny-toy", "broken-toy"} <= set(installed_checkpoint_names())
    assert "'tiny-toy'" in refusal("tiny-tyo")
    assert "toy_model_package" not in sys.modules


def test_an_unknown_name_lists_the_installed_ones(site: Path) -> None:
    report = refusal("zzzzzz")
    assert "does not exist" in report
    for name in ("absent-toy", "broken-toy", "tiny-toy"):
        assert name in report


def test_a_path_is_not_a_name(site: Path) -> None:
    assert "does not exist" in refusal("./tiny-toy")


@pytest.mark.parametrize(("name", "cause"), [("broken-toy", "OSError"), ("absent-toy", "no_such")])
def test_a_broken_package_is_named(site: Path, name: str, cause: str) -> None:
    report = refusal(name)
    assert "toy 3.1" in report and cause in report


def test_a_name_of_two_packages_is_rejected(site: Path) -> None:
    install(site, "other", "tiny-toy = other_package:model_dir\n")
    report = refusal("tiny-toy")
    assert "toy 3.1" in report and "other 3.1" in report

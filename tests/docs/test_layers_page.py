"""docs/plugins/layers.md: its model matches transformers, and it lists every layer."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from docs.pages import page

from dovetail_torch import layers

PAGE = page("layers")


@pytest.fixture
def package(tmp_path, install):
    """Install the package of the page and return the directory of its tests."""
    model, tests = PAGE.blocks("python")
    (project,) = PAGE.blocks("toml")
    install(
        "acme_layers", {"__init__.py": model}, tomllib.loads(project)["project"]["entry-points"]
    )
    (tmp_path / "test_page.py").write_text(tests, "utf-8")
    return tmp_path


def test_the_tests_on_the_layers_page_pass(package, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(package / "site-packages"))
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_page.py"], cwd=package, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "3 passed" in done.stdout


def test_the_layers_page_lists_every_layer():
    named = {line.split("`")[1] for line in PAGE.text.splitlines() if line.startswith("| `")}
    public = {name for name in layers.__all__ if name[0].isupper()}
    others = {"HeadShape", "ParallelLinear", "TorchLinearMethod", "TorchOps", "CompletedOps"}
    others |= {"ACTIVATIONS", "ExpertShape", "Norm"}
    others |= {"BlockWeight"}  # described on the page of linear methods
    assert public - others <= named


def test_code_lines_of_the_page_have_at_most_100_columns():
    code = [line for block in PAGE.blocks("python") for line in block.splitlines()]
    assert max(map(len, code)) <= 100

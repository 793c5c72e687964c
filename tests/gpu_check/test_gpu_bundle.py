"""Tests the content, versions and size of the bundle for machines without a network."""

from __future__ import annotations

import re
import sys

import pytest
from gpu import bundle

from architecture.sources import ROOT, members, project_of


def test_the_bundle_has_every_member_without_native_cpu_code():
    every = {project_of(folder)["name"] for folder in members()}
    assert every - set(bundle.members()) == {
        "dovetail-attn-cpu",
        "dovetail-cpu",
        "dovetail-cpu-kernels",
    }


def test_the_bundle_has_only_dependencies_that_the_machine_lacks():
    needed = bundle.needed(bundle.members(), "3.12")
    assert {"pydantic", "pydantic-core", "msgspec", "pyzmq", "cyclopts", "pytest"} <= set(needed)
    assert not bundle.PROVIDED & set(needed)
    assert not [name for name in needed if name.startswith(("dovetail", "nvidia"))]
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/constraints.txt").read_text(), re.M)
    )
    pinned = {name: version for name, version in needed.items() if name in pins}
    assert len(pinned) >= 6 and all(pins[name] == version for name, version in pinned.items())


def test_requirements_are_evaluated_for_the_target_python():
    requirements = [
        "old; python_version < '3.12'",
        "new>=2; python_version >= '3.12'",
        "extra; extra == 'gpu'",
        "windows; sys_platform == 'win32'",
        "Plain_Name[more]>=1,<2",
    ]
    assert list(bundle._names(requirements, "3.12")) == ["new", "plain-name"]
    assert list(bundle._names(requirements, "3.11")) == ["old", "plain-name"]


@pytest.mark.parametrize(("num_bytes", "code"), [(59_000_000, 0), (60_000_001, 1)])
def test_a_bundle_that_is_too_large_is_rejected(num_bytes, code, tmp_path, monkeypatch, capsys):
    files = {"a.whl": {"bytes": num_bytes, "sha256": ""}}
    monkeypatch.setattr(bundle, "gather", lambda into, python: {"commit": "abc", "files": files})
    monkeypatch.setattr(sys, "argv", ["bundle.py", "--into", str(tmp_path / "bundle")])
    assert bundle.main() == code
    assert ("limit is 60 MB" in capsys.readouterr().err) == bool(code)


def test_git_ignores_the_bundle_directory():
    assert "/.gpu-bundle" in (ROOT / ".gitignore").read_text("utf-8").split()

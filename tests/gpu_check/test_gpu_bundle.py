"""The bundle for a machine without a network: what is in it, at which versions, and how large."""

from __future__ import annotations

import re
import sys

import pytest
from gpu import bundle

from architecture.sources import ROOT, members, project_of


def test_every_member_travels_but_those_with_native_code_for_the_cpu():
    every = {project_of(folder)["name"] for folder in members()}
    assert every - set(bundle.members()) == {
        "dovetail-attn-cpu",
        "dovetail-cpu",
        "dovetail-cpu-kernels",
    }


def test_what_members_need_travels_and_what_the_machine_has_does_not():
    needed = bundle.needed(bundle.members(), "3.12")
    assert {"pydantic", "pydantic-core", "msgspec", "pyzmq", "cyclopts", "pytest"} <= set(needed)
    assert not bundle.PROVIDED & set(needed)
    assert not [name for name in needed if name.startswith(("dovetail", "nvidia"))]
    pins = dict(
        re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements/constraints.txt").read_text(), re.M)
    )
    pinned = {name: version for name, version in needed.items() if name in pins}
    assert len(pinned) >= 6 and all(pins[name] == version for name, version in pinned.items())


def test_requirements_are_those_of_the_machine_not_of_this_one():
    wishes = [
        "old; python_version < '3.12'",
        "new>=2; python_version >= '3.12'",
        "extra; extra == 'gpu'",
        "windows; sys_platform == 'win32'",
        "Plain_Name[more]>=1,<2",
    ]
    assert list(bundle._names(wishes, "3.12")) == ["new", "plain-name"]
    assert list(bundle._names(wishes, "3.11")) == ["old", "plain-name"]


@pytest.mark.parametrize(("num_bytes", "code"), [(59_000_000, 0), (60_000_001, 1)])
def test_a_bundle_that_is_too_large_is_refused(num_bytes, code, tmp_path, monkeypatch, capsys):
    files = {"a.whl": {"bytes": num_bytes, "sha256": ""}}
    monkeypatch.setattr(bundle, "gather", lambda into, python: {"commit": "abc", "files": files})
    monkeypatch.setattr(sys, "argv", ["bundle.py", "--into", str(tmp_path / "bundle")])
    assert bundle.main() == code
    assert ("more than 60 MB" in capsys.readouterr().err) == bool(code)


def test_the_folder_is_not_for_git():
    assert "/.gpu-bundle" in (ROOT / ".gitignore").read_text("utf-8").split()

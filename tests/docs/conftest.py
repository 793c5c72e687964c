"""Fixtures for the tests of the plugin guide."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors are slower with two threads
    yield
    torch.set_num_threads(before)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs the package of a page. Uninstall it after the test."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    known = set(sys.modules)

    def installed(name, files, entry_points):
        package, info = site / name, site / f"{name}-1.0.dist-info"
        for folder in (package, info):
            folder.mkdir()
        for file, text in files.items():
            (package / file).write_text(text, "utf-8")
        lines = [
            line
            for group, entries in entry_points.items()
            for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        importlib.invalidate_caches()

    yield installed
    for name in set(sys.modules) - known:
        if name.startswith("acme"):
            del sys.modules[name]

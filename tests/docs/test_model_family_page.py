"""docs/plugins/model_family.md: its family can be installed, and agrees with transformers."""

from __future__ import annotations

import importlib
import tomllib

from docs.pages import page

MAX_LINES = 80
PACKAGE = "acme_seed_oss"


def test_the_model_family_on_the_page_agrees_with_transformers(install, tmp_path):
    guide = page("model_family")
    family, tests = guide.blocks("python")
    assert len(family.splitlines()) <= MAX_LINES
    (project,) = guide.blocks("toml")
    entry_points = tomllib.loads(project)["project"]["entry-points"]
    install(PACKAGE, {"__init__.py": family, "page_tests.py": tests}, entry_points)
    module = importlib.import_module(f"{PACKAGE}.page_tests")
    actual = [test for name, test in vars(module).items() if name.startswith("test_")]
    assert len(actual) == 2
    for test in actual:
        folder = tmp_path / test.__name__
        folder.mkdir()
        test(folder)

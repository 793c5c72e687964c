"""A small git checkout with tests, in which other tests run pytest."""

from __future__ import annotations

import subprocess
from pathlib import Path

SETTINGS = """
[tool.pytest.ini_options]
addopts = ["-m", "not slow and not soak"]
testpaths = ["part", "*/others"]
markers = ["clock: one", "slow: two", "soak: three", "sampled: four", "costly: five"]
"""


def commit(tree: Path) -> None:
    """Commit all files of `tree`."""
    named = ("-c", "user.name=x", "-c", "user.email=x@y")
    subprocess.run(["git", "add", "-A"], cwd=tree, check=True)
    subprocess.run(["git", *named, "commit", "-qm", "x"], cwd=tree, check=True)

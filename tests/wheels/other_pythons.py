"""Finds interpreters of other Python versions and creates environments for them with pip.

Packages come from a package index or pip's cache. Without both, a test is skipped with the reason;
with `DOVETAIL_REQUIRE_DOWNLOADS=1`, which `.ci/run` sets, it fails instead.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from shutil import which

import pytest

REQUIRE_DOWNLOADS = "DOVETAIL_REQUIRE_DOWNLOADS"
NO_INDEX = ("Could not find a version", "No matching distribution", "Failed to establish")
"""Messages of pip if a package index lacks a package or cannot be reached."""


def find_python(version: str) -> Path:
    """Return the interpreter of `version` ("3.12"). Skip the test if there is none."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for path in filter(None, candidates):
        done = subprocess.run([path, "--version"], capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return Path(path)
    pytest.skip(f"there is no Python {version} on this machine")


def make_pip_environment(folder: Path, python: Path, *requirements: object, at: Path) -> Path:
    """Install `requirements` into a new environment. Return its interpreter.

    at: the working directory of pip. Skips the test if a package cannot be downloaded.
    """
    subprocess.run([python, "-m", "venv", folder], check=True, capture_output=True)
    interpreter = folder / "bin" / "python"
    pip_install(interpreter, requirements, at=at)
    return interpreter


def pip_install(interpreter: Path, requirements: Iterable[object], *, at: Path) -> None:
    """Run `pip install` with `requirements` in the environment of `interpreter`."""
    command = [interpreter, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, *map(str, requirements)], cwd=at, capture_output=True, text=True
    )
    if done.returncode == 0:
        return
    missing = any(words in done.stderr for words in NO_INDEX)
    if missing and not os.environ.get(REQUIRE_DOWNLOADS):
        last = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"neither a package index nor pip's cache is available: {last}")
    raise AssertionError(f"pip install failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")

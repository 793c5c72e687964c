"""The seed of the parity tests. It is computed from the commit, so that nobody can choose it."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("dovetail-core", "torch", "transformers")


@cache
def commit_seed() -> tuple[int, str]:
    """Return a 32-bit seed and its source.

    The seed is the first 8 hexadecimal digits of the current commit or, without a git checkout, of
    the SHA-256 of the versions of `PACKAGES`.
    """
    command = ["git", "rev-parse", "--verify", "HEAD"]
    try:
        response = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10
        )
        commit = response.stdout.strip() if response.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    if commit:
        return int(commit[:8], 16), f"commit {commit[:8]}"
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return int(
        hashlib.sha256(versions.encode()).hexdigest()[:8], 16
    ), f"no git checkout: {versions}"

"""Describes the contents of a bundle: wheels, and an index with their names and the commit.

Standard library only: it is used before packages are installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BUNDLE = ".gpu-bundle"
INDEX = "bundle.json"


def read_bundle(folder: Path) -> dict[str, Any]:
    """Return the index of a bundle, or an empty dict without one."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return index

"""What lies in a bundle: wheels, and a file that says what they are and of which commit.

Standard library only: it is read where nothing is installed yet.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BUNDLE = ".gpu-bundle"
INDEX = "bundle.json"


def read_bundle(folder: Path) -> dict[str, Any]:
    """Return what a bundle says of itself; empty where there is none."""
    file = folder / INDEX
    if not file.is_file():
        return {}
    told: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return told

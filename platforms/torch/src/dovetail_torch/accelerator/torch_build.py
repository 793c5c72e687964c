"""Properties of the installed torch build, read from its files: importing torch takes seconds.

This module does not depend on a device: the caller specifies the field of torch's `version.py`.
"""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """version: torch's version, "" without torch. toolkit: version of the device toolkit, or ""."""

    version: str
    toolkit: str


def read_torch_build(field: str) -> TorchBuild:
    """Return the installed build of torch. `field` is the variable with the toolkit's version."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return TorchBuild(version="", toolkit="")
    stated = _constants(Path(spec.origin).with_name("version.py"))
    return TorchBuild(version=stated.get("__version__", ""), toolkit=stated.get(field, ""))


def _constants(path: Path) -> dict[str, str]:
    """Return the strings that a module assigns to names, or {} if it cannot be read."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    constants = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants |= {
                target.id: value.value for target in targets if isinstance(target, ast.Name)
            }
    return constants

"""Imports third-party libraries before the process forks to test changed copies of the project."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

_LIBRARIES = (
    "torch",
    "numpy",
    "pydantic",
    "tokenizers",
    "jinja2",
    "safetensors.torch",
    "tqdm",
    "zmq",
)


def import_libraries() -> None:
    """Import the libraries that the project uses, once for all forks.

    Raises RuntimeError if a module of the project is already imported, because the forks would
    inherit it.
    """
    for name in _LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    own = [name for name in sys.modules if name.partition(".")[0].startswith("dovetail")]
    if own:
        raise RuntimeError(f"{own[0]} is already imported; a changed copy would not be loaded")

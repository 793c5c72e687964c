"""Weight loading: the mapping of checkpoint names to parameters, and the built-in loaders.

The public names are imported when they are first used, so that the submodules for files
(`checkpoint_files`, `fingerprint`) can be used without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dovetail_torch.layers.linear import pack_linears
    from dovetail_torch.weights.assignment import (
        Assignment,
        MappedAssignment,
        Target,
        WeightTable,
        build_weight_table,
    )
    from dovetail_torch.weights.dummy_loader import DummyLoader
    from dovetail_torch.weights.safetensors_loader import SafetensorsLoader
    from dovetail_torch.weights.tied_weights import untie_different

_MODULES = {
    "dovetail_torch.layers.linear": "pack_linears",
    "dovetail_torch.weights.assignment": "Assignment MappedAssignment Target WeightTable "
    "build_weight_table",
    "dovetail_torch.weights.dummy_loader": "DummyLoader",
    "dovetail_torch.weights.safetensors_loader": "SafetensorsLoader",
    "dovetail_torch.weights.tied_weights": "untie_different",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "Assignment",
    "DummyLoader",
    "MappedAssignment",
    "SafetensorsLoader",
    "Target",
    "WeightTable",
    "build_weight_table",
    "pack_linears",
    "untie_different",
]


def __getattr__(name: str) -> object:
    """Import the public name `name` when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value

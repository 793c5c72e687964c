"""Weight loading: the mapping of checkpoint names to parameters, and the built-in loaders."""

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

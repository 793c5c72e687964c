"""Selects the plugins that read a quantized checkpoint, or rejects the checkpoint.

A linear method reads checkpoints of the format X if its `provides` has "quantization.X": the name
in lower case, with "_" for every other character ("quantization.compressed_tensors"). The same id
in `provides` of a weight loader means that the loader dequantizes the weights, or passes them as
blocks of a GGUF type. The decision uses JSON files and plugins only, before a worker starts and
before a weight file is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.config.draft import Draft
from dovetail.errors import ModelError, PluginNotFoundError
from dovetail.interfaces.config_fields import AUTO, reference_name
from dovetail.interfaces.platform import Platform
from dovetail.plugins import PluginRegistry
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.selection import Criteria, select

PREFIX = "quantization."
"""Prefix of the capability ids for checkpoint formats."""

BLOCKS = "quantization.gguf"
"""Capability id of linear methods that compute with the blocks of GGUF files."""

_ADVICE = {
    "torchao": " Its files contain objects of the package torchao. Load the unquantized checkpoint "
    "with quantization='int8' or 'fp8', which have the accuracy of torchao's formats.",
}
"""Advice for formats that no plugin of this repository reads."""
_KIND = "linear_method"
_FIELD = "compute.linear_method"
_LOADER_KIND = "weight_loader"
_LOADER_FIELD = "load.load_format"


def choose_quantization_plugins(draft: Draft, plugins: PluginRegistry, platform: Platform) -> None:
    """Select a linear method or a weight loader for the format of a quantized checkpoint.

    A linear method that reads the format has precedence. A weight loader that reads the format can
    be combined with any linear method; the default is one that computes with GGUF blocks. Raises
    ModelError if no installed or, for fields that the user has set, requested plugin reads the
    format.
    """
    quantization = draft.requested.model.quantization
    if not quantization:
        return
    capability = capability_of(quantization["method"])
    reason = f"the checkpoint is quantized with {quantization['method']}"
    reference: Any = draft.get(_FIELD)
    if reference == AUTO:
        method = _find(plugins, platform, _KIND, capability)
        if method is not None:
            draft.put(_FIELD, method, reason)
            return
    elif capability in declared_ids(plugins.load(_KIND, reference), "provides"):
        return
    if not quantization.get("dequantizes", False):
        loader = _loader(draft, plugins, platform, capability)
        if loader is None:
            detail = f" The linear method {reference_name(reference)!r} does not read this format."
            raise _rejection(quantization, plugins, "" if reference == AUTO else detail)
        draft.put(_LOADER_FIELD, loader, reason)
    if reference == AUTO and (method := _find(plugins, platform, _KIND, BLOCKS)) is not None:
        draft.put(_FIELD, method, reason)


def find_dequantizer(
    quantization: Mapping[str, Any], plugins: PluginRegistry, platform: Platform
) -> str | type:
    """Return the weight loader that dequantizes a checkpoint. Raise ModelError if there is none.

    quantization: `ModelDirectory.quantization`, which must not be empty.
    """
    loader = _find(plugins, platform, _LOADER_KIND, capability_of(quantization["method"]))
    if loader is None:
        raise _rejection(quantization, plugins, " No installed weight loader dequantizes it.")
    return loader


def _loader(
    draft: Draft, plugins: PluginRegistry, platform: Platform, capability: str
) -> str | type | None:
    """Return the requested weight loader, or an installed one, if it reads the format."""
    requested: Any = draft.requested.load.load_format
    if requested == AUTO:
        return _find(plugins, platform, _LOADER_KIND, capability)
    provides = declared_ids(plugins.load(_LOADER_KIND, requested), "provides")
    return requested if capability in provides else None


def _find(
    plugins: PluginRegistry, platform: Platform, kind: str, capability: str
) -> str | type | None:
    """Return the best installed plugin that provides a capability, or None."""
    criteria = Criteria(references=(AUTO,), platform=platform, provides=frozenset({capability}))
    try:
        return select(plugins, kind, criteria).reference
    except PluginNotFoundError:
        return None


def capability_of(method: str) -> str:
    """Return the capability id of linear methods that read checkpoints of `method`."""
    return PREFIX + re.sub(r"[^a-z0-9_]", "_", method.lower())


def _rejection(quantization: Mapping[str, Any], plugins: PluginRegistry, detail: str) -> ModelError:
    kinds = (_KIND, _LOADER_KIND)
    names = sorted({result.name for kind in kinds for result in plugins.candidates(kind)})
    return ModelError(
        f"This checkpoint is quantized with {quantization['method']!r} "
        f"({quantization['source']}).{detail} Installed methods and loaders: "
        f"{', '.join(names) or 'none'}; a "
        f'plugin that reads it declares "{capability_of(quantization["method"])}" in `provides`. '
        "Use an unquantized checkpoint of the model, or install a plugin that reads this one."
        f"{_ADVICE.get(quantization['method'], '')}"
    )

"""Selects a linear method that reads a quantized checkpoint, or rejects the checkpoint.

A linear method reads checkpoints of the format X if its `provides` has "quantization.X": the name
in lower case, with "_" for every other character ("quantization.compressed_tensors"). The decision
uses JSON files and plugins only, before a worker starts and before a weight file is opened.
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

_KIND = "linear_method"
_FIELD = "compute.linear_method"


def choose_linear_method(draft: Draft, plugins: PluginRegistry, platform: Platform) -> None:
    """Select a linear method that reads the checkpoint's format, if the checkpoint is quantized.

    If the weight loader can dequantize the weights, no such method is needed. Otherwise raises
    ModelError if the requested method does not read the format or, with automatic selection, no
    method does.
    """
    quantization = draft.requested.model.quantization
    if not quantization:
        return
    capability = capability_of(quantization["method"])
    reference: Any = draft.get(_FIELD)
    dequantizes = quantization.get("dequantizes", False)
    if reference != AUTO:
        if not dequantizes and capability not in declared_ids(
            plugins.load(_KIND, reference), "provides"
        ):
            name = reference_name(reference)
            raise _rejection(
                quantization,
                plugins,
                f" The linear method {name!r} does not read this format.",
            )
        return
    criteria = Criteria(references=(AUTO,), platform=platform, provides=frozenset({capability}))
    try:
        selected = select(plugins, _KIND, criteria)
    except PluginNotFoundError:
        if dequantizes:
            return
        raise _rejection(quantization, plugins, "") from None
    reason = f"the checkpoint is quantized with {quantization['method']}"
    draft.put(_FIELD, selected.reference, reason)


def capability_of(method: str) -> str:
    """Return the capability id of linear methods that read checkpoints of `method`."""
    return PREFIX + re.sub(r"[^a-z0-9_]", "_", method.lower())


def _rejection(quantization: Mapping[str, Any], plugins: PluginRegistry, detail: str) -> ModelError:
    names = sorted({candidate.name for candidate in plugins.candidates(_KIND)})
    return ModelError(
        f"This checkpoint is quantized with {quantization['method']!r} "
        f"({quantization['source']}).{detail} Installed methods: {', '.join(names) or 'none'}; a "
        f'method that reads it declares "{capability_of(quantization["method"])}" in `provides`. '
        "Use an unquantized checkpoint of the model, or install a plugin that reads this one."
    )

"""Quantized checkpoints are run by a linear method that declares their format, or refused.

A linear method reads checkpoints of the format X if its `provides` has "quantization.X", the name
in small letters with "_" for every other character ("quantization.compressed_tensors"). Decided
from JSON files and plugins alone, before a worker starts and before a weight file is opened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dovetail.config.engine_config import Change
from dovetail.config.field_types import reference_name
from dovetail.errors import ModelError
from dovetail.plugins.capabilities import declared_ids
from dovetail.plugins.platform_answers import preferred_names
from dovetail.plugins.selection import AUTO, try_candidate

if TYPE_CHECKING:
    from dovetail.config import EngineConfig
    from dovetail.interfaces import Platform
    from dovetail.plugins import PluginRegistry

PREFIX = "quantization."
"""Of the capability ids by which linear methods say which formats they read."""

_KIND = "linear_method"


def choose_quantized_method(
    config: EngineConfig, plugins: PluginRegistry, platform: Platform
) -> EngineConfig:
    """Return `config` with a linear method that reads the checkpoint's format.

    config: resolved; returned as it is for a checkpoint that is not quantized. Raises ModelError
    where neither the method that the user named nor one that may be taken unasked reads it.
    """
    quantization = config.model.quantization
    if not quantization:
        return config
    capability = capability_of(quantization["method"])
    reference = config.compute.linear_method
    if reference != AUTO:
        if capability in declared_ids(plugins.load(_KIND, reference), "provides"):
            return config
        name = reference_name(reference)
        raise _refusal(config, plugins, f", which the linear method {name!r} does not read")
    for candidate in plugins.automatic(_KIND, preferred_names(platform, _KIND)):
        cls, _ = try_candidate(plugins, candidate)
        if cls is not None and capability in declared_ids(cls, "provides"):
            return _with_method(config, candidate.reference)
    raise _refusal(config, plugins, "")


def capability_of(method: str) -> str:
    """Return the capability id of linear methods that read checkpoints of `method`."""
    return PREFIX + re.sub(r"[^a-z0-9_]", "_", method.lower())


def _with_method(config: EngineConfig, reference: str) -> EngineConfig:
    change = Change(
        field="compute.linear_method",
        before=AUTO,
        after=reference,
        reason=f"the checkpoint is quantized with {config.model.quantization['method']}",
    )
    compute = type(config.compute)(**{**dict(config.compute), "linear_method": reference})
    changes = (*config.changes, change)
    return type(config)(**{**dict(config), "compute": compute, "changes": changes})


def _refusal(config: EngineConfig, plugins: PluginRegistry, detail: str) -> ModelError:
    quantization = config.model.quantization
    names = sorted({candidate.name for candidate in plugins.candidates(_KIND)})
    return ModelError(
        f"This checkpoint is quantized with {quantization['method']!r} "
        f"({quantization['source']}){detail}. Installed methods: {', '.join(names) or 'none'}; a "
        f'method that reads it declares "{capability_of(quantization["method"])}" in `provides`. '
        "Use an unquantized checkpoint of the model, or install a plugin that reads this one."
    )

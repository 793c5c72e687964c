"""Decides whether an engine generates or pools, and how it pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.config.model_directory import ModelDirectory
from dovetail.config.model_implementation import FALLBACK
from dovetail.config.pooling_modules import read_modules
from dovetail.errors import ConfigError, PluginError
from dovetail.interfaces.requested_config import POOLING_TYPES, RUNNERS
from dovetail.plugins import PluginRegistry
from dovetail.value_checks import shorten

POOLING = "pooling"
"""Name of the pooling runner, and capability id of model classes that only pool."""
WHOLE_PROMPTS = "whole_prompts"
"""Capability id of model classes whose attention is bidirectional."""


def choose_pooler(
    values: Mapping[str, Any],
    directory: ModelDirectory,
    architecture: str,
    plugins: PluginRegistry,
) -> Mapping[str, Any]:
    """Return the pooler's configuration (`CheckpointFields.pooler`); {} for a model that generates.

    values: the options. runner="auto" selects pooling for a directory of sentence-transformers, for
    a model file that states its pooling, and for an architecture whose manifest declares "pooling"
    or whose checkpoint has no LM head.
    Raises ConfigError for an option that contradicts the model, and ModelError for invalid files.
    """
    runner, pooling_type = values["runner"], values["pooling_type"]
    for name, value, choices in (
        ("runner", runner, RUNNERS),
        ("pooling_type", pooling_type, POOLING_TYPES),
    ):
        if value not in choices:
            raise ConfigError(f"{name}={shorten(value)} must be one of {', '.join(choices)}.")
    provides = _provides(architecture, plugins)
    is_native = architecture != FALLBACK
    only_pools = POOLING in provides or (is_native and architecture != directory.architecture)
    modules = _read_pooling(directory) if runner != "generate" else {}
    if runner == "generate" and only_pools:
        raise ConfigError(
            f"runner='generate': the architecture {directory.architecture} supports only pooling; "
            "omit runner."
        )
    if runner == "generate" or (runner == "auto" and not only_pools and not modules):
        if pooling_type != "auto":
            raise ConfigError(
                f"pooling_type={pooling_type!r} has no effect on a generative model; set "
                "runner='pooling', or omit pooling_type."
            )
        return {}
    if not is_native:
        raise ConfigError(
            f"No installed plugin has a native model of the architecture "
            f"{shorten(directory.architecture)}, and transformers' classes support only "
            "generation, not pooling. Choose another model, or install a plugin for this "
            "architecture."
        )
    _check_options(values)
    pooling = modules.get("pooling", "auto") if pooling_type == "auto" else pooling_type
    return {
        "normalize": True,
        **modules,
        "pooling": pooling,
        "whole_prompts": WHOLE_PROMPTS in provides,
    }


def _read_pooling(directory: ModelDirectory) -> Mapping[str, Any]:
    """Return what the model defines about pooling, as `read_modules` does; {} for nothing."""
    if directory.path.is_dir():
        return read_modules(directory.path)
    return {} if directory.pooling is None else {"pooling": directory.pooling}


def _provides(architecture: str, plugins: PluginRegistry) -> frozenset[str]:
    try:
        return plugins.describe("model", architecture).entry.provides
    except PluginError:  # reported when the model is loaded
        return frozenset()


def _check_options(values: Mapping[str, Any]) -> None:
    for name in ("kv_connector", "logits_processors", "step_extensions", "num_lookahead_tokens"):
        if values[name]:
            raise ConfigError(f"{name} has no effect on a pooling model; omit it.")

"""Chooses between a native model and the transformers library for an architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dovetail.config.model_directory import ModelDirectory
from dovetail.errors import ConfigError
from dovetail.plugins import PluginRegistry
from dovetail.value_checks import shorten

MODEL_IMPLS = ("auto", "native", "transformers")
FALLBACK = "TransformersForCausalLM"
"""The name of the model plugin that serves architectures without a native model."""
FALLBACK_LOADER = "transformers"
_DECODER_ENDINGS = ("ForCausalLM", "LMHeadModel")
_WITHOUT_HEAD: Mapping[str, tuple[str, ...]] = {
    "TextModel": _DECODER_ENDINGS,
    "Model": _DECODER_ENDINGS,
    "ForMaskedLM": ("Model",),
    "ForPreTraining": ("Model",),
}
"""Maps endings of pooling architectures to those of native models with the same layers."""


def choose_implementation(
    values: Mapping[str, Any], directory: ModelDirectory, plugins: PluginRegistry
) -> tuple[str, dict[str, str]]:
    """Return the architecture to load, and default values by path in the configuration.

    values: the options. model_impl="auto" chooses transformers for an architecture that no
    installed plugin has and whose name is not a misspelling of an installed one. Raises ConfigError
    for an option that the fallback does not support, for a fallback that is not installed, and for
    a model file, which only native models support.
    """
    architecture, model_impl = directory.architecture, values["model_impl"]
    if model_impl not in MODEL_IMPLS:
        raise ConfigError(
            f"model_impl={shorten(model_impl)} must be one of {', '.join(MODEL_IMPLS)}."
        )
    if model_impl != "transformers":
        architecture = native_pooler(architecture, plugins) or architecture
    if model_impl == "native":
        return architecture, {}
    is_file = "load.load_format" in directory.defaults
    is_installed = any(item.name == FALLBACK for item in plugins.candidates("model"))
    if model_impl == "auto" and (
        is_file or not is_installed or _has_native(architecture, directory, plugins)
    ):
        return architecture, {}
    if not is_installed:
        raise ConfigError(
            "model_impl='transformers' needs the distribution dovetail-transformers, which is not "
            "installed: pip install dovetail[transformers]."
        )
    if is_file:
        raise ConfigError(
            f"model_impl='transformers' needs a model directory, and {directory.path} is a file. "
            "Set model_impl='native'."
        )
    if values["batch_invariant"]:
        raise ConfigError(
            "batch_invariant=True is not guaranteed by the implementation in transformers, which "
            f"serves {architecture}. Set batch_invariant=False."
        )
    return FALLBACK, {"load.load_format": FALLBACK_LOADER}


def native_pooler(architecture: str, plugins: PluginRegistry) -> str:
    """Return the native model that pools for an architecture that no plugin has, or "".

    For example, a MistralModel is a MistralForCausalLM without a head, and the body of a
    BertForMaskedLM is a BertModel.
    """
    for ending, others in _WITHOUT_HEAD.items():
        if architecture.endswith(ending) and not plugins.has_model(architecture):
            family = architecture.removesuffix(ending)
            names = [family + other for other in others if plugins.has_model(family + other)]
            if names:
                return names[0]
    return ""


def _has_native(architecture: str, directory: ModelDirectory, plugins: PluginRegistry) -> bool:
    """Return whether the model needs a native implementation, installed or not.

    True if a plugin provides the architecture, or if the transformers library cannot contain it. In
    that library, an architecture's name starts with the first part of its model_type, and contains
    the other parts, except "text", in any order: HunYuanMoEV1ForCausalLM has the model_type
    hunyuan_v1_moe. Any other name is a class of a plugin, or is misspelled.
    """
    model_type = directory.config.get("model_type")
    if not isinstance(model_type, str):
        return True
    first, *others = re.findall("[a-z0-9]+", model_type.casefold()) or [""]
    name = architecture.casefold().replace("_", "")
    are_found = all(part in name or part == "text" for part in others)
    is_family = bool(first) and name.startswith(first) and are_found
    return not is_family or plugins.has_model(architecture, similar=False)

"""Finds the transformers class for a config.json. Rejects models with incorrect results.

Code in a model directory is never run.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dovetail.errors import ModelError
from dovetail.value_checks import shorten
from dovetail_transformers.attention_calls import IMPLEMENTATION, attention_function

__all__ = ["LOCK", "find_class", "no_init_weights", "read_config"]
transformers.AttentionInterface.register(IMPLEMENTATION, attention_function)

LOCK = threading.RLock()
"""Held while a model is created or loaded: transformers replaces torch functions globally."""
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "global", "local"})
_VARYING_ROPE = ("dynamic", "longrope")
"""RoPE types whose angles depend on the request's length, so that cached keys become invalid."""


def read_config(fields: Mapping[str, Any]) -> transformers.PreTrainedConfig:
    """Return the config object. Raise ModelError if transformers does not know the model."""
    plain = json.loads(json.dumps(fields, default=dict))
    name, model_type = plain["architectures"][0], plain.get("model_type")
    if "quantization_config" in plain:
        raise ModelError(
            "config.json: quantization_config is not supported by the implementation in "
            "transformers; use a checkpoint that is not quantized."
        )
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise _unknown(name, model_type)
    try:
        config = CONFIG_MAPPING[model_type].from_dict(plain)
    except (TypeError, ValueError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ModelError(
            f"config.json: transformers rejects it: {' '.join(str(error).split())[:300]}"
        ) from error
    _check(config)
    return config


def find_class(
    fields: Mapping[str, Any], config: transformers.PreTrainedConfig
) -> type[transformers.PreTrainedModel]:
    """Return the causal language model that config.json names. Raise ModelError for another one."""
    name = str(fields["architectures"][0])
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _unknown(name, config.model_type)
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = cls if isinstance(cls, tuple) else (cls,)
    for cls in classes:
        if cls.__name__ == name:
            return cls
    names = ", ".join(cls.__name__ for cls in classes)
    raise ModelError(
        f"config.json names {shorten(name)}; the causal language model in transformers for "
        f"model_type {config.model_type!r} is {names}."
    )


def _unknown(name: object, model_type: object) -> ModelError:
    return ModelError(
        f"config.json: no installed plugin has a model of the architecture {shorten(name)}, and "
        f"transformers {transformers.__version__} has no causal language model for model_type "
        f"{shorten(model_type)}.\n"
        "Install a plugin for this architecture, or write one: dovetail plugins new model NAME. "
        "Code in the model directory is never run."
    )


def _check(config: transformers.PreTrainedConfig) -> None:
    """Raise ModelError for properties that transformers implements outside of its interface."""
    if config.is_encoder_decoder:
        raise _unsupported("is_encoder_decoder", True)
    language_config = config.sub_configs.get("text_config") and config.text_config
    if language_config:
        cls = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(language_config), None)
        name = getattr(cls, "__name__", "a causal language model")
        raise ModelError(
            "config.json has a text_config: the model reads more than text, such as images, which "
            f"is not supported. Use a checkpoint of its language model alone ({name})."
        )
    if getattr(config, "is_decoder", None) is False and config.model_type in ("bert", "roberta"):
        raise _unsupported("is_decoder", False)
    for field in ("alibi", "attention_chunk_size", "use_alibi"):
        if getattr(config, field, None):
            raise _unsupported(field, getattr(config, field))
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise _unsupported("layer_types", ", ".join(sorted(map(str, kinds))))
    for kind in _rope_types(getattr(config, "rope_parameters", None)):
        if kind in _VARYING_ROPE:
            raise _unsupported("rope_type", kind)


def _rope_types(parameters: object) -> list[object]:
    """Return the RoPE types of all types of layers."""
    if not isinstance(parameters, Mapping):
        return []
    sections = [parameters, *(item for item in parameters.values() if isinstance(item, Mapping))]
    return [section.get("rope_type") for section in sections]


def _unsupported(field: str, value: object) -> ModelError:
    return ModelError(
        f"config.json: {field} is {shorten(value)}, which the implementation in transformers does "
        "not support here. Install a plugin with a model of this architecture."
    )

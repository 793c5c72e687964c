"""Checks flat options and reads the model directory: from `EngineArgs` to `RequestedConfig`.

This module replaces aliases, rejects options that are not supported, and turns paths into
directories. This module does not resolve fields that the user left open ("auto", None). It loads no
plugin except the source and the format of the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.config.model_directory import (
    SAMPLING_NAMES,
    ModelDirectory,
    default_sampling_params,
    eos_token_ids,
)
from dovetail.config.model_implementation import choose_implementation
from dovetail.config.pooling import choose_pooler
from dovetail.errors import ConfigError, ModelError, nearest
from dovetail.interfaces.config_fields import AUTO, ConfigNode, reference_name
from dovetail.interfaces.requested_config import (
    ExtensionsConfig,
    LimitsConfig,
    ObservabilityConfig,
    PluginsConfig,
    RequestedCache,
    RequestedCompute,
    RequestedConfig,
    RequestedLoad,
    RequestedModel,
    RequestedParallel,
    RequestedScheduler,
)
from dovetail.model_files import MAX_BYTES, file_exists, read_json_object
from dovetail.plugins import PluginRegistry
from dovetail.plugins.resolving.plugin_policy import PluginPolicy
from dovetail.plugins.working_directory import check_working_directory
from dovetail.value_checks import MAX_OPTION_DEPTH, exceeds_depth, plain_text, shorten

if TYPE_CHECKING:
    from dovetail.config.engine_args import EngineArgs

logger = logging.getLogger(__name__)

_SECTIONS: dict[str, type[ConfigNode]] = {
    "cache": RequestedCache,
    "scheduler": RequestedScheduler,
    "parallel": RequestedParallel,
    "load": RequestedLoad,
    "compute": RequestedCompute,
    "observability": ObservabilityConfig,
    "extensions": ExtensionsConfig,
    "limits": LimitsConfig,
    "plugins": PluginsConfig,
}

_ALIASES = {
    "scheduling_policy": "scheduler_cls",
    "distributed_executor_backend": "executor_backend",
    "quantization": "linear_method",
}

_EXECUTORS = {"uni": "uniproc", "mp": "multiproc"}
"""Maps vLLM's name of an executor to Dovetail's name."""

_REFUSED = (
    ("trust_remote_code", False, "code in a model directory is never run; install a plugin"),
)


def assemble(args: EngineArgs) -> RequestedConfig:
    """Return the checked options of `args`. Reads only JSON files of the model directory.

    Raises ConfigError, with the option, its value and a remedy, for an invalid option, and
    ModelError for an invalid model directory.
    """
    check_working_directory()
    values = {name: _plain(getattr(args, name)) for name in args.descriptions()}
    _reject_unsupported(values)
    _replace_aliases(values)
    values["compile_cache"] = _path_text("compile_cache", values["compile_cache"])
    sections: dict[str, Any] = {
        name: section(**{key: values[key] for key in section.model_fields})
        for name, section in _SECTIONS.items()
    }
    plugins = PluginRegistry(
        policy=PluginPolicy.of(sections["plugins"]), options=values["plugin_options"]
    )
    return RequestedConfig(
        model=_assemble_model(values, plugins), plugin_options=values["plugin_options"], **sections
    )


def _plain(value: Any) -> Any:
    """Convert a subclass of str to a plain str, so that no overridden method is called."""
    return plain_text(value) if isinstance(value, str) else value


def _reject_unsupported(values: Mapping[str, Any]) -> None:
    for name, only, remedy in _REFUSED:
        value = values[name]
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise ConfigError(f"{name}={shorten(value)} is not supported: {remedy}.")


def _replace_aliases(values: dict[str, Any]) -> None:
    for name in ("executor_backend", "distributed_executor_backend"):
        if isinstance(values[name], str):
            values[name] = _EXECUTORS.get(values[name], values[name])
    for alias, name in _ALIASES.items():
        value, named = values[alias], values[name]
        if value is None:
            continue
        if not isinstance(value, type) and (not isinstance(value, str) or not value):
            raise ConfigError(f"{alias}={shorten(value)} must be None or the name of a plugin.")
        if named not in (AUTO, value):
            raise ConfigError(
                f"{alias}={shorten(reference_name(value))} conflicts with "
                f"{name}={shorten(reference_name(named))}; they are two names of one option: "
                "set only one of them."
            )
        values[name] = value


def _assemble_model(values: Mapping[str, Any], plugins: PluginRegistry) -> RequestedModel:
    path_text = _path_text("model", values["model"])
    overrides = _optional_mapping("hf_overrides", values["hf_overrides"])
    directory = ModelDirectory.open(
        path_text, revision=_revision(values["revision"]), hf_overrides=overrides, plugins=plugins
    )
    if values["load_format"] == AUTO:
        directory.check_weights(plugins)
    for note in directory.notes:
        logger.info(note)
    architecture, defaults = choose_implementation(values, directory, plugins)
    pooler = choose_pooler(values, directory, architecture, plugins)
    generation = _generation_config(values, directory)
    # Checked once here; otherwise every request would fail, and no error would name the option.
    default_sampling_params(generation)
    eos_token_ids(directory.config, generation)
    name = values["served_model_name"]
    plain = "tokenizer_mode skip_tokenizer_init dtype max_model_len seed max_logprobs enforce_eager"
    return RequestedModel(
        model=path_text,
        model_dir=directory.path,
        tokenizer_dir=_tokenizer_directory(values["tokenizer"], directory),
        architecture=architecture,
        hf_config=directory.config,
        generation_config=generation,
        quantization=directory.quantization,
        pooler=pooler,
        defaults=_defaults(values, directory) | defaults,
        served_model_name=path_text if name is None else name,
        **{key: values[key] for key in plain.split()},
    )


def _revision(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"revision={shorten(value)} must be None, or a branch, tag or commit.")


def _defaults(values: Mapping[str, Any], directory: ModelDirectory) -> dict[str, str]:
    """Return the model's defaults, without `tokenizer_mode` if the user gave a tokenizer."""
    own_tokenizer = values["tokenizer"] is not None
    return {
        path: name
        for path, name in directory.defaults.items()
        if not (own_tokenizer and path == "model.tokenizer_mode")
    }


def _path_text(name: str, value: object) -> str:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else ""
    if not isinstance(text, str) or not text.strip():
        expected = "path or name of a model" if name == "model" else "path of a local directory"
        raise ConfigError(f"{name}={shorten(value)} must be the {expected}.")
    return text


def _local_path(name: str, value: object) -> Path:
    """Return an absolute path. An unknown user in "~user" is left as it is."""
    text = os.path.expanduser(_path_text(name, value))
    if not os.path.isabs(text):
        check_working_directory()
    return Path(text).absolute()


def _optional_mapping(name: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name}={shorten(value)} must be a mapping with strings as keys.")
    if exceeds_depth(value):
        raise ConfigError(
            f"{name}={shorten(value)} is nested more than {MAX_OPTION_DEPTH} levels deep."
        )
    return value


def _tokenizer_directory(value: object, directory: ModelDirectory) -> Path:
    if value is None:
        return directory.path
    path = _local_path("tokenizer", value)
    if not os.path.isdir(path):
        raise ConfigError(
            f"tokenizer={shorten(str(value))} is not a local directory; specify the directory that "
            "has tokenizer.json, or omit the option to use the model's tokenizer. (The kind of "
            "tokenizer is selected with tokenizer_mode.)"
        )
    return path


def _generation_config(values: Mapping[str, Any], directory: ModelDirectory) -> dict[str, Any]:
    choice = values["generation_config"]
    base = directory.generation_config
    if choice in ("none", "vllm"):
        # Sampling defaults are dropped, but the end-of-sequence tokens belong to the model.
        base = {key: base[key] for key in ("eos_token_id",) if key in base}
    elif choice != "auto":
        base = _read_generation_config(choice)
    return {**base, **_generation_overrides(values["override_generation_config"])}


def _read_generation_config(choice: object) -> Mapping[str, Any]:
    path = _local_path("generation_config", choice)
    if os.path.isdir(path):
        path = path / "generation_config.json"
    if not file_exists(path):
        raise ConfigError(
            f"generation_config={shorten(str(choice))}: the file {path} does not exist; use "
            '"auto", "none", or a directory with a generation_config.json.'
        )
    return read_json_object(path, max_bytes=MAX_BYTES["generation_config.json"])


def _generation_overrides(value: object) -> Mapping[str, Any]:
    name = "override_generation_config"
    overrides = _optional_mapping(name, value)
    known = (*SAMPLING_NAMES, "eos_token_id")
    for key in overrides:
        if key not in known:
            raise ConfigError(
                f"{name} has the unknown key {key!r}.{nearest(key, known)} Known keys: "
                f"{', '.join(known)}."
            )
    try:
        default_sampling_params(overrides)
        eos_token_ids({}, overrides)
    except ModelError as error:
        raise ConfigError(f"{name}={shorten(value)} is not valid. {error}") from None
    return overrides

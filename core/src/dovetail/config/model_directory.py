"""Reads the description of a model: config.json of a model directory, or a model file.

This module opens no weights and no tokenizer, and runs no code of the model. A name that is not a
local path may select a model source, which may download the model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.config.checkpoint_quantization import read_quantization
from dovetail.config.format_files import check_weights, choose_file, format_names, make_format
from dovetail.config.model_fields import check_model_fields, check_token_ids
from dovetail.config.model_sources import HUB, find_model, is_hub_name, source_names
from dovetail.errors import ConfigError, ModelError, RequestError, nearest
from dovetail.interfaces.frozen_mapping import freeze
from dovetail.interfaces.model_format import ModelDescription
from dovetail.model_files import file_exists, read_json_object
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import call_plugin
from dovetail.plugins.resolving.refusals import listed_models
from dovetail.plugins.working_directory import check_working_directory
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import shorten

SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling defaults of a generation config, and their names in `SamplingParams`."""

CONFIG_FILE = "config.json"
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """The contents of a model directory or model file. Frozen, including its mappings.

    path: the absolute path. config: config.json with the user's overrides applied.
    generation_config: empty if there is none. quantization: the result of `read_quantization`, or
    of the model format.
    defaults: default values by path in the configuration, such as "load.load_format". notes:
    sentences for the log about ignored contents. pooling: see `ModelDescription`.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pooling: str | None = None

    @property
    def architecture(self) -> str:
        """The architecture: the first name in "architectures"."""
        return str(self.config["architectures"][0])

    def check_weights(self, plugins: PluginRegistry) -> None:
        """Raise ModelError if a directory with config.json has no weights but in model files."""
        if os.path.isdir(self.path):
            check_weights(self.path, plugins)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        revision: str | None = None,
        hf_overrides: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        plugins: PluginRegistry | None = None,
    ) -> ModelDirectory:
        """Read the model at `path`. Keys of `hf_overrides` replace those of config.json.

        path: a model directory, a model file, or a name for a model source ("demo").
        revision: branch, tag or commit of a model on the hub; None for the default.
        config.json can only name installed models; `hf_overrides` may also name a class
        ("package.module:Class").
        plugins: the registry to find model sources and model formats; None for all that are
        installed.

        Raises ModelError, at most three lines: the path does not exist, no installed model format
        reads the file, no config.json, invalid JSON, a field of a wrong type or range, no
        architecture, an architecture that is not a plain name, or code in the directory with
        `trust_remote_code`. Raises PluginError if a model source or format cannot be loaded.
        """
        plugins = plugins or PluginRegistry()
        located = _locate(os.fspath(path), plugins, revision)
        described = _describe(located, plugins)
        stated = described.config
        config = {**stated, **(hf_overrides or {})}
        _check_architectures(described.file, config)
        _check_fields(described.file, config)
        if "architectures" not in (hf_overrides or {}):
            _check_plain_names(described.file, stated["architectures"], plugins)
        notes = _check_auto_map(located, config, trust_remote_code)
        quantization = described.quantization
        if described.file.name == CONFIG_FILE:
            quantization = read_quantization(described.file.parent, config)
        return cls(
            path=described.path,
            config=freeze(config),
            generation_config=freeze(described.generation_config),
            quantization=freeze(quantization),
            defaults=freeze(described.defaults),
            notes=(*described.notes, *notes),
            pooling=described.pooling,
        )


@dataclass(frozen=True, kw_only=True)
class _Described:
    """A model description and its origin.

    path: the model directory or file. file: the file to name in messages.
    """

    path: Path
    file: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    pooling: str | None = None


def _describe(located: Path, plugins: PluginRegistry) -> _Described:
    """Read config.json of a directory, or let the plugin of a model file read it."""
    file = located
    if os.path.isdir(located):
        if file_exists(located / CONFIG_FILE):
            return _describe_directory(located)
        file = choose_file(located, plugins)
    reader = make_format(_suffix(file), plugins)
    owner = f"model format {_suffix(file)!r}"
    description = call_plugin(owner, "description of a model", lambda: reader.describe(file))
    if not isinstance(description, ModelDescription):
        raise ModelError(
            f"The {owner} returned {shorten(description)}; it must return a ModelDescription."
        )
    quantization = dict(description.quantization)
    if quantization:
        quantization["dequantizes"] = description.dequantizes
    return _Described(
        path=file,
        file=file,
        config=description.config,
        generation_config=description.generation_config,
        quantization=quantization,
        defaults={
            "load.load_format": description.load_format,
            "model.tokenizer_mode": description.tokenizer_mode,
        },
        notes=description.notes,
        pooling=description.pooling,
    )


def _describe_directory(directory: Path) -> _Described:
    generation_path = directory / "generation_config.json"
    return _Described(
        path=directory,
        file=directory / CONFIG_FILE,
        config=read_json_object(directory / CONFIG_FILE),
        generation_config=read_json_object(generation_path) if file_exists(generation_path) else {},
    )


def _suffix(file: Path) -> str:
    return file.suffix[1:].lower()


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation config or, if it has none, of config.json.

    Each may have one id or a list of ids. Raises ModelError, naming file and field, for other
    values. Ids may be outside of the vocabulary, as in many small test models.
    """
    sources = (("generation_config.json", generation_config), ("config.json", config))
    for name, source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        check_token_ids("eos_token_id", name, value)
        ids = value if isinstance(value, (list, tuple)) else (value,)
        if ids:
            return frozenset(ids)
    return frozenset()


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults of a generation config as fields of `SamplingParams`.

    max_new_tokens becomes max_tokens; null means not set. do_sample is ignored: greedy sampling is
    requested with temperature 0. Raises ModelError for a value out of its bounds.
    """
    stated = {
        name: generation_config[key]
        for key, name in SAMPLING_NAMES.items()
        if generation_config.get(key) is not None
    }
    try:
        SamplingParams(**stated)
    except RequestError as error:
        fields = {name: key for key, name in SAMPLING_NAMES.items()}
        key = fields.get(error.parameter, error.parameter)
        raise ModelError(
            f"generation_config.json: {key} is {shorten(generation_config.get(key))}: {error}"
        ) from None
    return stated


def _locate(model: str, plugins: PluginRegistry, revision: str | None) -> Path:
    """Return the absolute path of a local model, or of the model that a model source provides."""
    if not os.path.isabs(model):
        check_working_directory()
    path = Path(os.path.expanduser(model)).absolute()
    source_path = None if os.path.lexists(path) else find_model(model, plugins, revision=revision)
    path = source_path or path
    _check_path(model, path, plugins)
    if revision is not None and source_path is None:
        raise ConfigError(
            f"revision={shorten(revision)} is not valid for the local path {path}.\n"
            "Only models on the hub have revisions; remove the option."
        )
    return path


def check_model_path(model: str) -> None:
    """Raise ModelError if the path `model` is neither a directory nor a model file."""
    _check_path(model, Path(os.path.expanduser(model)).absolute(), PluginRegistry())


def _check_path(model: str, path: Path, plugins: PluginRegistry) -> None:
    if model and os.path.isdir(path):
        return
    formats = format_names(plugins)
    if os.path.isfile(path):
        if _suffix(path) in formats:
            return
        known = ", ".join(f"*.{name}" for name in formats) or "none"
        is_model = os.path.isfile(path.parent / "config.json")
        perhaps = f", perhaps {str(path.parent)!r}" if is_model else ""
        raise ModelError(
            f"model={model!r} is a file that no installed model format reads (installed: "
            f"{known}).\nSpecify the directory that holds config.json and weights{perhaps}."
        )
    if model and os.path.lexists(path):
        kind = "not a regular file" if os.path.exists(path) else "a link to a missing file"
        raise ModelError(f"model={model!r} is {kind}. Specify a model directory or file.")
    sources = source_names(plugins)
    hint = nearest(path.name, [*_sibling_directories(path), *sources])
    if is_hub_name(model) and HUB not in sources:
        raise ModelError(
            f"model={model!r} is not a local directory, and no model source for the hub is "
            "installed.\nRun: pip install 'dovetail-model-sources[hub]'"
        )
    advice = "Specify the path of a local model directory or file"
    if sources:
        advice = f"{advice}, or the name of a model source: {', '.join(sources)}"
    raise ModelError(f"model={model!r} does not exist.{hint}\n{advice}.")


def _sibling_directories(directory: Path) -> list[str]:
    try:
        with os.scandir(directory.parent) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (OSError, ValueError):
        # A hint that cannot be computed must not replace the error.
        return []


def _check_architectures(file: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    valid = isinstance(names, (list, tuple)) and bool(names)
    if not valid or not all(isinstance(name, str) and name for name in names or ()):
        description = (
            f"architectures={_shown(names)}" if "architectures" in config else "no architectures"
        )
        raise ModelError(
            f"{file} has {description}; it must have a list of names.\n"
            'Set it with, for example, hf_overrides={"architectures": ["LlamaForCausalLM"]}.'
        )


def _check_fields(file: Path, config: Mapping[str, Any]) -> None:
    """Check the fields. For a model file, errors name the file instead of config.json."""
    try:
        check_model_fields(config)
    except ModelError as error:
        if file.name == CONFIG_FILE:
            raise
        raise ModelError(f"{file}: {str(error).removeprefix('config.json: ')}") from None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_plain_names(file: Path, names: Sequence[str], plugins: PluginRegistry) -> None:
    """Raise ModelError if a model names a class, a file or a distribution.

    A model must not choose code: it can only name a model that is installed.
    """
    for name in names:
        if _PLAIN_NAME.fullmatch(name) is None:
            raise ModelError(
                f"{file} has architectures={_shown(names)}. A model "
                "directory can only name an installed model, not a class, file or distribution.\n"
                f"Installed: {listed_models(plugins.candidates('model')) or 'none'}.\n"
                'To use a class, pass hf_overrides={"architectures": [...]}.'
            )


def _check_auto_map(
    directory: Path, config: Mapping[str, Any], trust_remote_code: bool
) -> tuple[str, ...]:
    if not config.get("auto_map"):
        return ()
    if trust_remote_code:
        raise ModelError(
            f"{directory} contains code (auto_map in config.json), which is never run.\n"
            "Do not set trust_remote_code. If the architecture is unknown, install a plugin with\n"
            "the model."
        )
    note = f"{directory} contains code (auto_map in config.json); it is ignored."
    return (note,)

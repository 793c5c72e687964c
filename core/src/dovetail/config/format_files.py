"""Finds the files of model formats, such as *.gguf, in a model directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dovetail.errors import ModelError
from dovetail.interfaces.model_format import ModelFormat
from dovetail.model_files import list_model_files
from dovetail.plugins import PluginRegistry
from dovetail.plugins.construction import construct

FORMAT_KIND = "model_format"
MAX_MODEL_FILES = 1000
"""Maximum number of model files of one format that are listed in a directory."""
_WEIGHTS = ".safetensors"
"""The ending of the weight files that belong to config.json."""


def format_names(plugins: PluginRegistry) -> list[str]:
    """Return the names of the installed model formats: the endings of their files."""
    candidates = plugins.candidates(FORMAT_KIND)
    return sorted({item.name for item in candidates if not plugins.denial(item)})


def make_format(name: str, plugins: PluginRegistry) -> ModelFormat:
    """Return an instance of the model format `name`."""
    cls = plugins.load(FORMAT_KIND, name)
    instance: ModelFormat = construct(
        FORMAT_KIND, cls, options=plugins.options_of(FORMAT_KIND, cls)
    )
    return instance


def choose_file(directory: Path, plugins: PluginRegistry) -> Path:
    """Return the model file in a directory without config.json.

    Raises ModelError unless exactly one installed format has files in the directory, all of one
    model.
    """
    files = _list_files(directory, plugins)
    if not files:
        raise ModelError(
            f"{directory} has no config.json, so it is not a model directory;\n"
            "specify the directory that holds config.json, the weights and the tokenizer."
        )
    if len(files) == 1:
        ((name, paths),) = files.items()
        chosen = make_format(name, plugins).choose(paths)
        if chosen is not None:
            return chosen
    raise ModelError(f"{directory} has no config.json, but {_advice(files)}")


def check_weights(directory: Path, plugins: PluginRegistry) -> None:
    """Raise ModelError if `directory`, which has config.json, has weights in model files only."""
    files = _list_files(directory, plugins)
    if files and not list_model_files(directory, _WEIGHTS, at_most=MAX_MODEL_FILES):
        raise ModelError(f"{directory} has config.json, but no *{_WEIGHTS} files; {_advice(files)}")


def _list_files(directory: Path, plugins: PluginRegistry) -> dict[str, list[Path]]:
    """Return the model files in a directory by the name of their format."""
    listed = {
        name: list_model_files(directory, f".{name}", at_most=MAX_MODEL_FILES)
        for name in format_names(plugins)
    }
    return {name: files for name, files in listed.items() if files}


def _advice(files: Mapping[str, list[Path]]) -> str:
    """Return the end of a message about a directory whose model file must be specified."""
    counts = " and ".join(
        f"{len(paths)} {'file' if len(paths) == 1 else 'files'} *.{name}"
        for name, paths in files.items()
    )
    first = next(iter(files.values()))[0]
    return (
        f"it contains {counts}.\nSpecify the path of one file (of a split model, the path of the "
        f"first part), for example {str(first)!r}."
    )

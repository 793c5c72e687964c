"""Reads config.json and generation_config.json of a model directory.

Opens no weights and no tokenizer, runs no code of the model, and uses no network.
Standard library only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail.config.checkpoint_quantization import read_quantization
from dovetail.config.installed_checkpoints import (
    find_installed_checkpoint,
    installed_checkpoint_names,
)
from dovetail.config.model_fields import check_model_fields, check_token_ids
from dovetail.errors import ModelError, RequestError, nearest
from dovetail.interfaces.frozen_mapping import freeze
from dovetail.model_files import file_exists, read_json_object
from dovetail.plugins.metadata.discovery import discover
from dovetail.sampling_params import SamplingParams
from dovetail.value_checks import shorten
from dovetail.working_directory import check_working_directory

SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling defaults of a generation config, and their names in `SamplingParams`."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_BARE_NAME = re.compile(r"\w[\w.-]*")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-]{1,200}")


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """The contents of a model directory. Frozen, including its mappings.

    path: absolute. config: config.json with the user's overrides applied. generation_config: empty
    if the file is missing. quantization: the result of `read_quantization`. notes: sentences for
    the log about ignored contents.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    quantization: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The first name in "architectures"."""
        return str(self.config["architectures"][0])

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        hf_overrides: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        no_plugins: bool = False,
    ) -> ModelDirectory:
        """Read the directory at `path`; keys of `hf_overrides` replace those of config.json.

        A name that is not a directory may be that of an installed checkpoint ("demo").
        config.json can only name installed models; `hf_overrides` may also name a class
        ("package.module:Class").
        no_plugins: use installed checkpoints of first-party packages only.

        Raises ModelError, at most three lines: no such directory, a file, no config.json, invalid
        JSON, a field of a wrong type or range, no architecture, an architecture that is not a plain
        name, or code in the directory with `trust_remote_code`.
        """
        directory = _locate(os.fspath(path), first_party_only=no_plugins)
        _check_directory(os.fspath(path), directory)
        if not file_exists(directory / "config.json"):
            raise ModelError(
                f"{directory} has no config.json, so it is not a model directory;\n"
                "give the directory that holds config.json, the weights and the tokenizer."
            )
        stated = read_json_object(directory / "config.json")
        config = {**stated, **(hf_overrides or {})}
        _check_architectures(directory, config)
        check_model_fields(config)
        if "architectures" not in (hf_overrides or {}):
            _check_plain_names(directory, stated["architectures"])
        notes = _check_auto_map(directory, config, trust_remote_code)
        generation_path = directory / "generation_config.json"
        generation = read_json_object(generation_path) if file_exists(generation_path) else {}
        return cls(
            path=directory,
            config=freeze(config),
            generation_config=freeze(generation),
            quantization=freeze(read_quantization(directory, config)),
            notes=notes,
        )


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> frozenset[int]:
    """Return the end-of-sequence ids of the generation config or, if it has none, of config.json.

    Each may have one id or a list of ids. Raises ModelError, naming file and field, for other
    values and for an id outside of the vocabulary in config.json.
    """
    sources = (("generation_config.json", generation_config), ("config.json", config))
    for name, source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        check_token_ids("eos_token_id", name, value, config.get("vocab_size"))
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


def _locate(asked: str, *, first_party_only: bool) -> Path:
    """Return the absolute path of a directory or, if it does not exist, of an installed name."""
    if not os.path.isabs(asked):
        check_working_directory()
    directory = Path(asked).expanduser().absolute()
    if os.path.isdir(directory) or not _BARE_NAME.fullmatch(asked):
        return directory
    installed = find_installed_checkpoint(asked, first_party_only=first_party_only)
    return directory if installed is None else installed.absolute()


def _check_directory(asked: str, directory: Path) -> None:
    if os.path.isdir(directory) and asked:
        return
    if os.path.isfile(directory):
        raise ModelError(
            f"model={asked!r} is a file; give the directory that holds config.json and weights:\n"
            f"perhaps {str(directory.parent)!r}."
        )
    installed = installed_checkpoint_names()
    hint = nearest(directory.name, [*_sibling_directories(directory), *installed])
    if _HUB_NAME.fullmatch(asked) and not os.path.isdir(directory.parent):
        raise ModelError(
            f"model={asked!r} is not a local directory, and there is no access to a model hub.\n"
            "Download the model by other means, and give the path of its directory."
        )
    names = f", or the name of an installed one: {', '.join(installed)}" if installed else ""
    raise ModelError(
        f"model={asked!r} does not exist.{hint}\nGive the path of a local model directory{names}."
    )


def _sibling_directories(directory: Path) -> list[str]:
    try:
        with os.scandir(directory.parent) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (OSError, ValueError):
        # A hint that cannot be computed must not replace the error.
        return []


def _check_architectures(directory: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    good = isinstance(names, (list, tuple)) and bool(names)
    if not good or not all(isinstance(name, str) and name for name in names or ()):
        found = (
            f"architectures={_shown(names)}" if "architectures" in config else "no architectures"
        )
        raise ModelError(
            f"{directory / 'config.json'} has {found}; it must have a list of names.\n"
            'Set it with, for example, hf_overrides={"architectures": ["LlamaForCausalLM"]}.'
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_plain_names(directory: Path, names: Sequence[str]) -> None:
    """Raise ModelError if config.json names a class, a file or a distribution.

    A model directory must not choose code: it can only name a model that is installed.
    """
    for name in names:
        if _PLAIN_NAME.fullmatch(name) is None:
            installed = [one.name for one in discover().candidates["model"]]
            raise ModelError(
                f"{directory / 'config.json'} has architectures={_shown(names)}. A model "
                "directory can only name an installed model, not a class, file or distribution.\n"
                f"Installed: {', '.join(installed) or 'none'}.\n"
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
            "Do not set trust_remote_code. If the architecture is then unknown, install a plugin\n"
            "that provides it."
        )
    note = f"{directory} contains code (auto_map in config.json); it is ignored."
    return (note,)

"""A model directory as its JSON files tell it: config.json and generation_config.json.

Opens no weights and no tokenizer, runs no code of the model, and reaches for no network.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dovetail.config.frozen_mapping import freeze
from dovetail.config.installed_checkpoints import (
    find_installed_checkpoint,
    installed_checkpoint_names,
)
from dovetail.errors import ModelError, RequestError, nearest
from dovetail.sampling_params import SamplingParams

SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Sampling defaults of a generation config, and what `SamplingParams` calls them."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_BARE_NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True, kw_only=True)
class ModelDirectory:
    """A model directory that was opened. Frozen, its mappings too.

    path: absolute. config: config.json under the user's overrides. generation_config: empty where
    the file is absent. notes: sentences for the log about what was seen and passed over.
    """

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
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
    ) -> ModelDirectory:
        """Read the directory at `path`; keys of `hf_overrides` replace those of config.json.

        A bare name that is no directory here may be that of an installed checkpoint ("demo").

        Raises ModelError, three lines at most: no such directory, a file, no config.json, broken
        JSON, no architecture, or code of the model's own with `trust_remote_code`.
        """
        directory = _locate(os.fspath(path))
        _check_directory(os.fspath(path), directory)
        if not os.path.isfile(directory / "config.json"):
            raise ModelError(
                f"{directory} has no config.json, so it is no model directory;\n"
                "give the directory that holds config.json, the weights and the tokenizer."
            )
        config = {**read_json_object(directory / "config.json"), **(hf_overrides or {})}
        _check_architectures(directory, config)
        notes = _check_auto_map(directory, config, trust_remote_code)
        generation_path = directory / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.exists() else {}
        return cls(
            path=directory,
            config=freeze(config),
            generation_config=freeze(generation),
            notes=notes,
        )


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`; raise ModelError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not valid JSON: {str(error).splitlines()[0]}.\nFetch it again."
        ) from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, but holds a {type(value).__name__}.")
    return value


def eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> frozenset[int]:
    """Return the ids that end a text: the generation config's if it names any, else config.json's.

    Each may state one id or a list of them. Raises ModelError for anything else.
    """
    sources = (("generation_config.json", generation_config), ("config.json", config))
    for name, source in sources:
        value = source.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, (list, tuple)) else (value,)
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ModelError(
                f"eos_token_id={value!r} of {name} must be a token id or a list of them;\n"
                "correct the file, or use hf_overrides or override_generation_config."
            )
        if ids:
            return frozenset(ids)
    return frozenset()


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling defaults that a generation config states, as `SamplingParams` has them.

    max_new_tokens becomes max_tokens; null counts as not stated. do_sample is not heeded: who
    wants greedy tokens asks for temperature 0. Raises ModelError for a value out of its bounds.
    """
    stated = {
        name: generation_config[key]
        for key, name in SAMPLING_NAMES.items()
        if generation_config.get(key) is not None
    }
    try:
        SamplingParams(**stated)
    except RequestError as error:
        raise ModelError(f"The generation config is wrong: {error}") from None
    return stated


def _locate(asked: str) -> Path:
    """Return the absolute path that was meant; a directory wins over an installed name."""
    directory = Path(asked).expanduser().absolute()
    if os.path.isdir(directory) or not _BARE_NAME.fullmatch(asked):
        return directory
    installed = find_installed_checkpoint(asked)
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
            f"model={asked!r} is no local directory, and there is no access to a model hub.\n"
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
        # No hint is better than another error about a place that nobody asked for.
        return []


def _check_architectures(directory: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    good = isinstance(names, (list, tuple)) and bool(names)
    if not good or not all(isinstance(name, str) and name for name in names or ()):
        found = f"architectures={names!r}" if "architectures" in config else "no architectures"
        raise ModelError(
            f"{directory / 'config.json'} states {found}; a list of names is needed.\n"
            'If you know it, give it: hf_overrides={"architectures": ["LlamaForCausalLM"]}.'
        )


def _check_auto_map(
    directory: Path, config: Mapping[str, Any], trust_remote_code: bool
) -> tuple[str, ...]:
    if not config.get("auto_map"):
        return ()
    if trust_remote_code:
        raise ModelError(
            f"{directory} brings code of its own (auto_map in config.json), which is never run.\n"
            "Leave trust_remote_code out; if the architecture is unknown then, install a plugin\n"
            "that provides it."
        )
    note = f"{directory} brings code of its own (auto_map in config.json); it is ignored."
    return (note,)

"""Reads the modules of a sentence-transformers directory: pooling, dense layers, normalization.

`modules.json` lists the modules in order; each has a directory with a config.json. Only the types
of modules that are computed natively are accepted; a module never chooses code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.model_files import MIB, file_exists, parse_json, read_json_object, read_model_file
from dovetail.value_checks import shorten

MODULES_FILE = "modules.json"
LENGTH_FILE = "sentence_bert_config.json"
MAX_MODULES = 16
MAX_FEATURES = 2**20
ACTIVATIONS = ("identity", "tanh", "gelu", "relu", "sigmoid", "silu")
"""Supported activations of dense layers: the name of the torch class in lower case."""

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}")
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_NAMES = {"lasttoken": "last"}
_SUPPORTED = ("cls", "mean", "last")


def read_modules(directory: Path) -> dict[str, Any]:
    """Return what the modules define; {} if the directory has no modules.json.

    pooling: "cls", "mean" or "last"; "" without a pooling module, for late interaction. normalize:
    whether the results have length 1. dense: dense layers in order, each with directory,
    in_features, out_features, bias, activation. max_seq_length: maximum tokens, if it is stated.
    Raises ModelError, naming the file, for an invalid file or an unsupported module.
    """
    file = directory / MODULES_FILE
    if not file_exists(file):
        return {}
    modules = parse_json(file, read_model_file(file, max_bytes=MIB))
    if not isinstance(modules, list) or not 0 < len(modules) <= MAX_MODULES:
        raise ModelError(f"{file} must have a list of 1 to {MAX_MODULES} modules.")
    result: dict[str, Any] = {"pooling": "", "normalize": False, "dense": ()}
    for module in modules:
        name, folder = _read_module(file, module)
        if result["normalize"]:
            raise ModelError(f"{file} has the module {name} after Normalize; this is unsupported.")
        _READERS[name](result, directory, folder)
    length = _read_length(directory / LENGTH_FILE)
    return {**result, "max_seq_length": length} if length else result


def _read_module(file: Path, module: object) -> tuple[str, str]:
    """Return the class name and the directory of a module."""
    entries: dict[str, object] = module if isinstance(module, dict) else {}
    kind = entries.get("type")
    name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
    if name not in _READERS:
        raise ModelError(
            f"{file} has the module {shorten(kind)}; supported: {', '.join(_READERS)}."
        )
    folder = entries.get("path", "")
    if not isinstance(folder, str) or (folder and _FOLDER.fullmatch(folder) is None):
        raise ModelError(f"{file}: path={shorten(folder)} must be the name of a subdirectory.")
    return name, folder


def _read_transformer(result: dict[str, Any], directory: Path, folder: str) -> None:
    if folder:
        raise ModelError(
            f"{directory / MODULES_FILE}: the transformer is in the directory {folder!r}; only a "
            "transformer in the model directory itself is supported. Specify that directory as "
            "the model, and set pooling_type."
        )


def _read_pooling(result: dict[str, Any], directory: Path, folder: str) -> None:
    file = directory / folder / "config.json"
    config = read_json_object(file)
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        modes = [_NAMES.get(mode, mode)]
    else:
        modes = [name for field, name in _MODES.items() if config.get(field) is True]
    if len(modes) != 1 or modes[0] not in _SUPPORTED:
        raise ModelError(
            f"{file} has the pooling modes {', '.join(map(shorten, modes)) or 'none'}; exactly one "
            f"of {', '.join(_SUPPORTED)} is supported."
        )
    result["pooling"] = modes[0]


def _read_dense(result: dict[str, Any], directory: Path, folder: str) -> None:
    file = directory / folder / "config.json"
    config = read_json_object(file)
    sizes = {name: config.get(name) for name in ("in_features", "out_features")}
    for name, value in sizes.items():
        if type(value) is not int or not 0 < value <= MAX_FEATURES:
            raise ModelError(
                f"{file}: {name}={shorten(value)} must be an integer from 1 to {MAX_FEATURES}."
            )
    bias = config.get("bias", True)
    kind = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = kind.rpartition(".")[2].lower() if isinstance(kind, str) else ""
    if type(bias) is not bool or activation not in ACTIVATIONS or not folder:
        raise ModelError(
            f"{file}: bias={shorten(bias)} must be true or false, and activation_function="
            f"{shorten(kind)} one of these classes of torch: {', '.join(ACTIVATIONS)}."
        )
    layer = {"folder": folder, **sizes, "bias": bias, "activation": activation}
    result["dense"] = (*result["dense"], layer)


def _read_normalize(result: dict[str, Any], directory: Path, folder: str) -> None:
    result["normalize"] = True


_READERS: Mapping[str, Callable[[dict[str, Any], Path, str], None]] = {
    "Transformer": _read_transformer,
    "Pooling": _read_pooling,
    "Dense": _read_dense,
    "Normalize": _read_normalize,
}


def _read_length(file: Path) -> int:
    """Return max_seq_length, or 0 if the file does not state it."""
    value = read_json_object(file).get("max_seq_length") if file_exists(file) else None
    if value is None:
        return 0
    if type(value) is not int or not 0 < value < 2**31:
        raise ModelError(f"{file}: max_seq_length={shorten(value)} must be a positive integer.")
    return value

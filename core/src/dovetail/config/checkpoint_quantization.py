"""Reads from a checkpoint's JSON files whether it is quantized, and with which method.

This module reads `quantization_config` of config.json (or `compression_config`, or MLX's
`quantization`). If config.json has none of these, the module reads the files that quantization
tools write next to it. It opens no weights. `dovetail.config.quantized_checkpoints` makes the
decisions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import ModelError
from dovetail.model_files import file_exists, read_json_object
from dovetail.value_checks import shorten

_METHOD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_IN_CONFIG = ("quantization_config", "compression_config")
_SIDE_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of quantization tools, and the method to assume if a file does not name its method."""


def read_quantization(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"method", "source", "config"} of a quantized checkpoint, {} if it is not quantized.

    config: config.json with the user's overrides applied; a null `quantization_config` means that
    the checkpoint is not quantized. method: the name in lower case. Raises ModelError, naming file
    and field, for values of a wrong type and for a table without a method.
    """
    part = config.get("text_config")
    sections = [("", config)] + ([("text_config.", part)] if isinstance(part, Mapping) else [])
    for prefix, table in sections:
        for name in _IN_CONFIG:
            if table.get(name) is not None:
                default = "compressed-tensors" if name == "compression_config" else ""
                return _describe(table[name], "config.json", prefix + name, default)
    if _is_mlx(config.get("quantization")):
        return _described("mlx", "quantization in config.json", config["quantization"])
    if "quantization_config" in config:
        return {}
    for file, default in _SIDE_FILES.items():
        if file_exists(directory / file):
            return _describe(read_json_object(directory / file), file, "", default)
    return {}


def _describe(table: Any, file: str, field: str, default: str) -> dict[str, Any]:
    """Return the quantization that `table` describes.

    field: the table's key; "" if it is the whole file.
    """
    if not isinstance(table, Mapping):
        raise ModelError(f"{file}: {field} is {shorten(table)}; it must be a JSON object.")
    inner = table.get("quantization")
    if file != "config.json" and isinstance(inner, Mapping):
        table = inner
    if not table:
        return {}
    method = table.get("quant_method")
    prefix = f"{field}." if field else ""
    if method is None:
        method = _implied_method(table, default)
        if method == "":
            return {}
    if not isinstance(method, str) or not _METHOD_NAME.fullmatch(method):
        description = "is absent" if method is None else f"is {shorten(method)}"
        raise ModelError(
            f"{file}: {prefix}quant_method {description}; it must be the name of a quantization "
            "method, "
            'such as "gptq".'
        )
    source = f"{field} in {file}" if field else file
    return _described(method.lower(), source, table)


def _implied_method(table: Mapping[str, Any], default: str) -> str | None:
    """Return the quantization method that other fields imply.

    Returns "" if the checkpoint is not quantized, and None if the fields imply nothing.
    """
    flags = [table[name] for name in ("load_in_4bit", "load_in_8bit") if name in table]
    if flags:
        return "bitsandbytes" if any(flag is not False for flag in flags) else ""
    if "quant_algo" in table:
        return "modelopt" if table["quant_algo"] is not None else ""
    if "config_groups" in table:
        return "compressed-tensors"
    return default or None


def _described(method: str, source: str, table: Mapping[str, Any]) -> dict[str, Any]:
    return {"method": method, "source": source, "config": dict(table)}


def _is_mlx(value: Any) -> bool:
    return isinstance(value, Mapping) and "bits" in value

"""Reads fields of config.json with their types. A ModelError for an invalid value names the field.

This module checks types and ranges only. The model files define which fields an architecture has
and their defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dovetail.errors import ModelError
from dovetail.value_checks import shorten

Config = Mapping[str, Any]

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 10_000
"""The maximum number of layers. Creating more layers would exhaust the memory, so a larger number
is treated as an error in the file."""


def read_count(config: Config, field: str, default: int | None = None, *, minimum: int = 1) -> int:
    """Return an integer. null counts as absent. An absent field without default is an error."""
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_COUNT:
        raise _wrong(field, value, f"an integer from {minimum} to {MAX_COUNT}")
    return value


def read_num_layers(config: Config) -> int:
    """Return num_hidden_layers."""
    num_layers = read_count(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise _wrong("num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    return num_layers


def read_number(config: Config, field: str, default: float) -> float:
    """Return a positive number, or the default if the field is absent or null."""
    value = config.get(field)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise _wrong(field, value, "a positive number")
    return float(value)


def read_optional(config: Config, field: str) -> float:
    """Return a positive number, or 0 if the field is absent, null or 0."""
    return read_number(config, field, 1.0) if config.get(field) else 0.0


def read_flag(config: Config, field: str, default: bool = False) -> bool:
    """Return a bool: the default if the field is absent or null."""
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise _wrong(field, value, "true or false")
    return default if value is None else value


def reject(config: Config, field: str, *, needs: object = False) -> None:
    """Raise ModelError if a field has a value other than `needs`, which is its default."""
    value = config.get(field)
    if value is not None and value != needs:
        raise ModelError(
            f"config.json: {field} is {shorten(value)}, which this architecture does not support "
            f"here; only {needs!r} is supported"
        )


def renamed(config: Config, **names: str) -> Config:
    """Return the config with the usual field names. names: the family's name for each field.

    A value under the usual name takes precedence.
    """
    usual = {name: config[own] for name, own in names.items() if own in config}
    return usual | {name: value for name, value in config.items() if value is not None}


def read_choice(config: Config, field: str, known: tuple[str, ...]) -> str:
    """Return one of the `known` values: the first of them if the field is absent or null."""
    value = config.get(field)
    if value is None:
        return known[0]
    if not isinstance(value, str) or value not in known:
        raise _wrong(field, value, f"one of {', '.join(known)}; no other value is supported")
    return str(value)


def _wrong(field: str, value: object, expected: str) -> ModelError:
    description = "is absent" if value is None else f"is {shorten(value)}"
    return ModelError(f"config.json: {field} {description}; it must be {expected}")

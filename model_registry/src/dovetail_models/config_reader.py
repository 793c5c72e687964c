"""Reads fields of config.json with their types. A ModelError for an invalid value names the field.

This module checks types and ranges only. The model files define which fields an architecture has
and their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.errors import ModelError
from dovetail.value_checks import shorten

Config = Mapping[str, Any]

MAX_COUNT = 2**31 - 1
MAX_LAYERS = 10_000
"""The maximum number of layers. Creating more layers would exhaust the memory, so a larger number
is treated as an error in the file."""


_LEAST, _GREATEST = 1e-30, 1e30
"""The range of numbers. No model has other values, and float32 cannot represent some of them."""


def read_count(config: Config, field: str, default: int | None = None, *, minimum: int = 1) -> int:
    """Return an integer. null counts as absent. An absent field without default is an error."""
    value = config.get(field)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MAX_COUNT:
        raise _wrong(config, field, value, f"an integer from {minimum} to {MAX_COUNT}")
    return value


def read_num_layers(config: Config) -> int:
    """Return num_hidden_layers."""
    num_layers = read_count(config, "num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise _wrong(config, "num_hidden_layers", num_layers, f"at most {MAX_LAYERS}")
    return num_layers


def read_number(config: Config, field: str, default: float) -> float:
    """Return a number from 1e-30 to 1e30, or the default if the field is absent or null."""
    value = config.get(field)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _LEAST <= value <= _GREATEST:
        expected = f"a positive number from {_LEAST:g} to {_GREATEST:g}"
        raise _wrong(config, field, value, expected)
    return float(value)


def read_optional(config: Config, field: str) -> float:
    """Return a positive number, or 0 if the field is absent, null, false or 0."""
    return 0.0 if config.get(field) in (None, 0) else read_number(config, field, 1.0)


def read_flag(config: Config, field: str, default: bool = False) -> bool:
    """Return a bool: the default if the field is absent or null."""
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise _wrong(config, field, value, "true or false")
    return default if value is None else value


def reject(config: Config, field: str, *, needs: object = False) -> None:
    """Raise ModelError if a field has a value other than `needs`, which is its default."""
    value = config.get(field)
    if value is not None and value != needs:
        raise ModelError(
            f"config.json: {own_name(config, field)} is {shorten(value)}, which this architecture "
            f"does not support here; only {needs!r} is supported"
        )


class _RenamedConfig(dict[str, Any]):
    """A config with the usual names of fields. own_names: the names in the file, by usual name."""

    def __init__(self, fields: Config, own_names: Mapping[str, str]) -> None:
        super().__init__(fields)
        self.own_names = own_names


def renamed(config: Config, **names: str) -> Config:
    """Return the config with the usual field names. names: the family's name for each field.

    A value under the usual name takes precedence. Errors name the field as in the file, or the
    family's name if the file has no field of `names`.
    """
    has_usual = any(config.get(name) is not None for name in names)
    own_names = {
        name: own
        for name, own in names.items()
        if config.get(name) is None and (own in config or not has_usual)
    }
    usual = {name: config[own] for name, own in names.items() if own in config}
    fields = usual | {name: value for name, value in config.items() if value is not None}
    return _RenamedConfig(fields, {**_own_names(config), **own_names})


def changed(config: Config, **fields: Any) -> Config:
    """Return the config with changed fields. The names of the other fields in errors are kept."""
    return _RenamedConfig({**config, **fields}, _own_names(config))


def own_name(config: Config, field: str) -> str:
    """Return the name of a field in the file. It differs from `field` in a `renamed` config."""
    return _own_names(config).get(field, field)


def _own_names(config: Config) -> Mapping[str, str]:
    return config.own_names if isinstance(config, _RenamedConfig) else {}


def read_choice(config: Config, field: str, known: tuple[str, ...]) -> str:
    """Return one of the `known` values: the first of them if the field is absent or null."""
    value = config.get(field)
    if value is None:
        return known[0]
    if not isinstance(value, str) or value not in known:
        expected = f"one of {', '.join(known)}; no other value is supported"
        raise _wrong(config, field, value, expected)
    return str(value)


def _wrong(config: Config, field: str, value: object, expected: str) -> ModelError:
    description = "is absent" if value is None else f"is {shorten(value)}"
    name = own_name(config, field)
    return ModelError(f"config.json: {name} {description}; it must be {expected}")

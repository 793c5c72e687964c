"""Reads the fields of an experiment file in bounded memory."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from dovetail.errors import UserError

_MAX_FILE_BYTES = 2**20
_MAX_DEPTH = 64
_MAX_VALUES = 100_000
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}
"""Parsers by file extension; all other files are parsed as TOML."""


def read_spec(path: Path) -> dict[str, Any]:
    """Return the fields of a TOML, YAML or JSON file; raise UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)  # a device has no size
        if len(content) > _MAX_FILE_BYTES:
            raise UserError(f"{str(path)!r} is larger than {_MAX_FILE_BYTES:,} bytes.")
        fields = _PARSERS.get(path.suffix, tomllib.loads)(content.decode("utf-8-sig"))
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{str(path)!r} is not UTF-8 text. Specify a TOML, YAML or JSON file."
        ) from error
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{str(path)!r} is not valid: {error}.") from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if not isinstance(fields, dict):
        raise UserError(f"{str(path)!r} does not contain a table of fields.")
    _check_size(path, fields)
    return fields


def _check_size(path: Path, fields: Mapping[str, Any]) -> None:
    """Raise UserError if the values are nested too deeply or there are too many.

    An alias in a YAML file can repeat a value many times, or contain itself.
    """
    stack: list[tuple[Any, int]] = [(fields, 1)]
    num_values = 0
    while stack:
        value, depth = stack.pop()
        if isinstance(value, Mapping | list):
            children = value.values() if isinstance(value, Mapping) else value
            num_values += len(value)
            stack += [(child, depth + 1) for child in children]
        if depth > _MAX_DEPTH:
            raise _too_deep(path)
        if num_values > _MAX_VALUES:
            raise UserError(f"{str(path)!r} has more than {_MAX_VALUES:,} values.")


def _too_deep(path: Path) -> UserError:
    return UserError(f"{str(path)!r} is not valid: its values are nested too deeply.")

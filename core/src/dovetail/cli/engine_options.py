"""The options of an engine as flags of a command, made from the fields of `EngineArgs`.

A field that is added there is a flag here, with its line of help; no flag is written by hand.
Checks nothing: `EngineArgs` and the config tree do. Mappings are given as JSON objects.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, make_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from dovetail.config.engine_args import EngineArgs
from dovetail.errors import ConfigError

ENGINE_GROUP = Group("Engine options", sort_key=2)
_HIDDEN = "Not supported"
"""Prefix of the help of options that are never accepted. `--help` does not list them."""

_PLAIN = (bool, int, float, str)
_SHOWN_DEFAULTS = (int, float)


def engine_args(options: EngineOptions) -> EngineArgs:
    """Return the options as `EngineArgs`; raise ConfigError for what is not a JSON object."""
    values = {option.name: getattr(options, option.name) for option in fields(EngineArgs)}
    for name in _MAPPINGS:
        text = values.pop(name)
        if text is not None:
            values[name] = _read_object(name, text)
    return EngineArgs(**values)


def _read_object(name: str, text: str) -> dict[str, Any]:
    flag = f"--{name.replace('_', '-')}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {text!r} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: {text!r} is not a JSON object; write it in braces.")
    return value


def _flag(option: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    """Return the field of the options' class for a field of `EngineArgs`."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    # Of what a field takes, the first that can be written on a command line; else text.
    plain: Any = next((member for member in _PLAIN if member in members), str)
    if get_origin(hint) is tuple:
        plain = tuple[str, ...]  # the flag may be given several times
    default = option.default
    if default is MISSING and option.default_factory is not MISSING:
        default = None
    shown = isinstance(default, _SHOWN_DEFAULTS) and not isinstance(default, bool)
    parameter = Parameter(
        help=option.metadata["help"],
        group=ENGINE_GROUP,
        negative="" if default in (False, ()) else None,
        show_default=shown,
        show=not option.metadata["help"].startswith(_HIDDEN),
    )
    if default is None:
        plain = plain | None
    annotation: Any = Annotated[plain, parameter]
    if default is MISSING:
        return option.name, annotation, field()
    return option.name, annotation, field(default=default)


def _is_mapping(hint: Any) -> bool:
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return any(get_origin(member) is Mapping for member in members)


_HINTS = get_type_hints(EngineArgs)
_MAPPINGS = tuple(option.name for option in fields(EngineArgs) if _is_mapping(_HINTS[option.name]))

if TYPE_CHECKING:
    EngineOptions = EngineArgs
else:
    EngineOptions = make_dataclass(
        "EngineOptions",
        [_flag(option, _HINTS[option.name]) for option in fields(EngineArgs)],
        frozen=True,
        kw_only=True,
    )
    # The parser takes classes of the module "types", where this one would be, for built-in ones.
    EngineOptions.__module__ = __name__

"""The engine options as command-line flags, generated from the fields of `EngineArgs`.

Each field of `EngineArgs` becomes a flag with the field's help line. Values are not checked here,
but by `EngineArgs` and the configuration. Mappings are given as JSON objects.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, make_dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from dovetail.cli.frame.help_page import more_options
from dovetail.cli.frame.shell_text import shell_help
from dovetail.config.engine_args import EngineArgs
from dovetail.errors import ConfigError
from dovetail.value_checks import MAX_OPTION_DEPTH, exceeds_depth, shorten

ENGINE_GROUP = Group("Engine options", sort_key=2)
MORE_GROUP = more_options("engine")
MAIN = (
    "model",
    "revision",
    "tokenizer",
    "dtype",
    "quantization",
    "max_model_len",
    "served_model_name",
    "seed",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduler_cls",
    "platform",
    "num_threads",
    "tensor_parallel_size",
    "plugin_options",
)
"""The options that `--help` shows; `--help-all` shows all."""
_PATH_STARTS = ("/", ".", "~")
_HIDDEN = "Not supported"
"""Start of the help line of an unsupported option, which `--help` does not list."""

_PLAIN = (bool, int, float, str)
_SHOWN_DEFAULTS = (int, float)


def engine_args(options: EngineOptions) -> EngineArgs:
    """Return the options as `EngineArgs`.

    Raises ConfigError for a mapping that is invalid JSON, and ModelError for a path that does not
    exist, before slow modules are imported.
    """
    model = str(options.model)
    if model.startswith(_PATH_STARTS) and not os.path.lexists(os.path.expanduser(model)):
        from dovetail.config.model_directory import check_model_path  # slow to import

        check_model_path(model)
    values = {option.name: getattr(options, option.name) for option in fields(EngineArgs)}
    for name in MAPPINGS:
        text = values.pop(name)
        if text is not None:
            values[name] = _read_object(name, text)
    return EngineArgs(**values)


def _read_object(name: str, text: str) -> dict[str, Any]:
    flag = f"--{name.replace('_', '-')}"
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {shorten(text)} is not valid JSON ({error}).") from None
    except RecursionError:
        raise _too_deep(flag, text) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{flag}: {shorten(text)} is not a JSON object; write it as {{…}}.")
    if exceeds_depth(value):
        raise _too_deep(flag, text)
    return value


def _too_deep(flag: str, text: str) -> ConfigError:
    return ConfigError(
        f"{flag}: {shorten(text)} is nested more than {MAX_OPTION_DEPTH} levels deep."
    )


def _flag(option: Field[Any], hint: Any) -> tuple[str, Any, Any]:
    """Return the name, type and default of the flag for a field of `EngineArgs`."""
    members = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    # The first type of the field that a command line can contain, otherwise a string.
    plain: Any = next((member for member in _PLAIN if member in members), str)
    if get_origin(hint) is tuple:
        plain = tuple[str, ...]  # the flag may be given several times
    default = option.default
    if default is MISSING and option.default_factory is not MISSING:
        default = None
    shown = isinstance(default, _SHOWN_DEFAULTS) and not isinstance(default, bool)
    parameter = Parameter(
        help=shell_help(option.metadata["help"]),
        group=ENGINE_GROUP if option.name in MAIN else MORE_GROUP,
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
MAPPINGS = tuple(option.name for option in fields(EngineArgs) if _is_mapping(_HINTS[option.name]))
"""The options whose values are JSON objects."""

if TYPE_CHECKING:
    EngineOptions = EngineArgs
else:
    EngineOptions = make_dataclass(
        "EngineOptions",
        [_flag(option, _HINTS[option.name]) for option in fields(EngineArgs)],
        frozen=True,
        kw_only=True,
    )
    # `make_dataclass` sets the module "types", whose classes the parser treats as built-in.
    EngineOptions.__module__ = __name__


def make_optional_model() -> Any:
    """Return a class like `EngineOptions`, in which the model may be missing (None)."""
    flags = [_flag(option, _HINTS[option.name]) for option in fields(EngineArgs)]
    name, hint, _ = flags[0]
    kind, parameter = get_args(hint)
    flags[0] = name, Annotated[kind | None, parameter], field(default=None)
    options_cls = make_dataclass("OptionalModelOptions", flags, frozen=True, kw_only=True)
    options_cls.__module__ = __name__
    setattr(sys.modules[__name__], options_cls.__name__, options_cls)
    return options_cls


def changed_options(options: EngineOptions) -> list[str]:
    """Return the flags of the options that do not have their default, without the model."""
    names = [item.name for item in fields(EngineArgs) if item.name != "model"]
    defaults = type(options)() if options.model is None else type(options)(model=options.model)
    return [
        f"--{name.replace('_', '-')}"
        for name in names
        if getattr(options, name) != getattr(defaults, name)
    ]

"""`--config FILE`: options of a command in a YAML file, with the names of the flags.

    max-model-len: 4096
    plugin-options: {fcfs: {}}

Options on the command line have precedence over the file, and the file over the defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args, get_origin

from cyclopts import Parameter, Token

from dovetail.cli.terminal import read_text_file
from dovetail.errors import ConfigError, nearest
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from cyclopts import App
    from cyclopts.argument import Argument, ArgumentCollection

MAX_BYTES = 1 << 16
MAX_DEPTH = 16
MAX_NODES = 10_000
FLAG = "--config"

ConfigOption = Annotated[
    Path | None,
    Parameter(name=FLAG, help="YAML file with options; the command line has precedence."),
]
"""The type annotation of a command's `--config` parameter."""

_TAG = "tag:yaml.org,2002:"
_TYPES = {
    bool: (("bool",), "true or false"),
    int: (("int",), "an integer"),
    float: (("int", "float"), "a number"),
}


class ConfigFile:
    """Adds the options of the file `--config` to the parsed options.

    arguments: the options of the last command, with their values and where the values come from.
    """

    def __init__(self) -> None:
        self.arguments: ArgumentCollection | None = None

    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Add the file's values to options that are not on the command line."""
        self.arguments = arguments
        options = {_flag(item): item for item in arguments if item.parse and _flag(item)}
        config_argument = options.pop(FLAG, None)
        if config_argument is None or not config_argument.tokens:
            return
        file = config_argument.tokens[-1].value
        for key, name, node in _entries(file):
            argument = options.get(name)
            if argument is None:
                raise ConfigError(
                    f"{_place(file, key)}: unknown option {shorten(key.value)}."
                    f"{nearest(name.removeprefix('--'), _plain(options))}"
                )
            if not argument.has_tokens:
                for index, value in enumerate(_values(file, node, argument)):
                    argument.append(
                        Token(keyword=name, value=value, source=_place(file, key), index=index)
                    )


def _flag(argument: Argument) -> str:
    return next((name for name in argument.names if name.startswith("--")), "")


def _plain(options: Mapping[str, Argument]) -> list[str]:
    return [name.removeprefix("--") for name in options]


def _entries(file: str) -> Iterator[tuple[Any, str, Any]]:
    """Yield (key node, flag, value node) per option.

    Raises ConfigError if the file is not a mapping.
    """
    root = _read(file)
    if root is None:
        return
    if type(root).__name__ != "MappingNode":
        raise ConfigError(f"{file} must have one option per line, such as port: 8000.")
    keys: dict[str, Any] = {}
    for key, value in root.value:
        if type(key).__name__ != "ScalarNode":
            raise ConfigError(f"{_place(file, key)}: the name of an option must be a plain string.")
        name = f"--{key.value.removeprefix('--').replace('_', '-')}"
        if name in keys:
            raise ConfigError(
                f"{_place(file, key)}: the option {shorten(key.value)} is already on line "
                f"{keys[name].start_mark.line + 1}. Remove one of them."
            )
        keys[name] = key
        yield key, name, value


def _values(file: str, node: Any, argument: Argument) -> list[str]:
    """Return the values of an option as command-line words. Raise ConfigError for a wrong type."""
    kind = type(node).__name__
    if kind == "MappingNode":
        if not _is_mapping(argument):
            _reject(file, node, argument, "a mapping")
        return [json.dumps(_construct(file, node))]
    if kind == "SequenceNode":
        if not _is_list(argument):
            _reject(file, node, argument, "a list")
        return [_scalar(file, item, argument) for item in node.value]
    if node.tag == f"{_TAG}null":
        return []
    return [_scalar(file, node, argument)]


def _scalar(file: str, node: Any, argument: Argument) -> str:
    """Return a value as a command-line word: true, false, a number, or the string in the file."""
    if type(node).__name__ != "ScalarNode":
        _reject(file, node, argument, "a nested value")
    expected = next((kind for kind in _TYPES if kind in _members(argument.hint)), None)
    if expected is None:
        return str(node.value)
    tag = node.tag.removeprefix(_TAG)
    if tag not in _TYPES[expected][0] or ":" in node.value:  # YAML 1.1 reads 1:30 as a number
        _reject(file, node, argument, shorten(node.value))
    return str(_construct(file, node)).lower()


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


def _is_list(argument: Argument) -> bool:
    return any(get_origin(member) is tuple for member in _members(argument.hint))


def _is_mapping(argument: Argument) -> bool:
    from dovetail.cli.engine_options import MAPPINGS

    return _flag(argument).removeprefix("--").replace("-", "_") in MAPPINGS


def _reject(file: str, node: Any, argument: Argument, description: str) -> NoReturn:
    expected = next((kind for kind in _TYPES if kind in _members(argument.hint)), None)
    words = "a list of strings" if _is_list(argument) else "a string"
    words = "a mapping" if _is_mapping(argument) else words
    words = _TYPES[expected][1] if expected else words
    name = _flag(argument).removeprefix("--")
    raise ConfigError(f"{_place(file, node)}: {name} is {description}; it must be {words}.")


def _place(file: str, node: Any) -> str:
    return f"{file}, line {node.start_mark.line + 1}"


def _read(file: str) -> Any:
    """Return the root node of a YAML file, or None if it is empty.

    Raises ConfigError for invalid YAML.
    """
    import yaml  # slow to import

    text = read_text_file(FLAG, file, max_bytes=MAX_BYTES)
    try:
        _check_events(file, yaml.parse(text, Loader=yaml.SafeLoader))
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{file}{line} is not valid YAML: {problem}.") from None


def _check_events(file: str, events: Any) -> None:
    """Reject anchors, aliases, tags, deep nesting and several documents, in linear time."""
    depth = documents = 0
    for count, event in enumerate(events):
        kind = type(event).__name__
        documents += kind == "DocumentStartEvent"
        depth += kind in ("MappingStartEvent", "SequenceStartEvent")
        depth -= kind in ("MappingEndEvent", "SequenceEndEvent")
        problem = ""
        if getattr(event, "anchor", None) is not None:
            problem = "anchors and aliases are not allowed"
        elif getattr(event, "tag", None) is not None:
            problem = "tags are not allowed"
        elif depth > MAX_DEPTH:
            problem = f"values are nested more than {MAX_DEPTH} levels deep"
        elif count > MAX_NODES:
            problem = f"it has more than {MAX_NODES} values"
        elif documents > 1:
            problem = "it has more than one document"
        if problem:
            raise ConfigError(f"{_place(file, event)}: {problem}.")


def _construct(file: str, node: Any) -> Any:
    """Return a node's value as JSON types. Raise ConfigError for duplicate keys and for dates."""
    kind = type(node).__name__
    if kind == "SequenceNode":
        return [_construct(file, item) for item in node.value]
    if kind == "MappingNode":
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if type(key).__name__ != "ScalarNode" or key.value in mapping:
                raise ConfigError(
                    f"{_place(file, key)}: each key must be a string that occurs once in a mapping."
                )
            mapping[key.value] = _construct(file, value)
        return mapping
    import yaml

    if node.tag.removeprefix(_TAG) in ("bool", "int", "float", "null"):
        return yaml.safe_load(node.value)
    return node.value

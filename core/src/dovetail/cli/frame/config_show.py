"""`dovetail config show`: the values of a command's options, and where each value comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import CycloptsError, MissingArgumentError, Parameter

from dovetail.cli.frame.config_file import FLAG, ConfigFile
from dovetail.cli.plugins_table import print_json, print_table
from dovetail.errors import ConfigError, nearest
from dovetail.value_checks import shorten

if TYPE_CHECKING:
    from cyclopts.argument import Argument

DEFAULT = "serve"
COMMANDS = (DEFAULT, "chat", "generate")
"""The commands that accept a configuration file."""

SECRET_ENDING = "api-key"
"""Options whose names end with this suffix have secret values, which are not shown."""

_COMMAND_HELP = "The command: serve, chat or generate."
_TOKENS_HELP = "Options of the command, as on its command line."
_ORIGIN_HELP = "Also print where each value comes from."
_JSON_HELP = "Print JSON instead of a table."


def show(
    *options: Annotated[str, Parameter(help=_TOKENS_HELP, allow_leading_hyphen=True)],
    command: Annotated[str, Parameter(help=_COMMAND_HELP)] = DEFAULT,
    origin: Annotated[bool, Parameter(negative="", help=_ORIGIN_HELP)] = False,
    json: Annotated[bool, Parameter(negative="", help=_JSON_HELP)] = False,
) -> int:
    """Show the values of a command's options: from its flags, the --config file or the defaults."""
    if command not in COMMANDS:
        raise ConfigError(
            f"The command {shorten(command)} accepts no configuration file; use one of "
            f"{', '.join(COMMANDS)}.{nearest(command, COMMANDS)}"
        )
    rows = [_row(argument) for argument in _parse(command, options)]
    if json:
        print_json([dict(zip(("option", "value", "origin"), row, strict=True)) for row in rows])
        return 0
    headings = ("option", "value", *(("origin",) if origin else ()))
    print_table(headings, [row[: len(headings)] for row in rows])
    return 0


def _parse(command: str, options: tuple[str, ...]) -> list[Argument]:
    """Return the options of a command with their values. Raise ConfigError if one is invalid."""
    from dovetail.cli.app import explain, load_app

    config = ConfigFile()
    tokens = [command, *options]
    app = load_app(tokens, config)
    try:
        app.parse_args(tokens, exit_on_error=False, print_error=False)
    except MissingArgumentError:
        pass  # such as the model, which has no default
    except CycloptsError as error:
        raise ConfigError(explain(error)) from None
    flags = [item for item in config.arguments or () if item.name.startswith("--")]
    return [flag for flag in flags if flag.parse and flag.name != FLAG]


def _row(argument: Argument) -> tuple[str, str, str]:
    """Return the name, the value and the origin of an option."""
    name = argument.name.removeprefix("--")
    if not argument.tokens:
        default: Any = argument.field_info.default
        required = default is argument.field_info.empty
        return name, "(missing)" if required else _text(default), "default"
    source = argument.tokens[0].source
    values = [_value(argument, token.value) for token in argument.tokens]
    shown = "(hidden)" if name.endswith(SECRET_ENDING) else ", ".join(values)
    return name, shown, "command line" if source == "cli" else source


def _value(argument: Argument, value: str) -> str:
    implicit = argument.tokens[0].implicit_value
    return _text(implicit) if isinstance(implicit, bool) and not value else value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

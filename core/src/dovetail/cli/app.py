"""The entry point of the command line: its commands, errors and exit codes.

A user error prints at most three lines on stderr; with `--traceback` it prints the traceback. Any
other error is a bug in Dovetail and always prints its traceback. This module imports no command, no
engine and no tensor library.

Exit codes: 0 success; 2 user error; 130 interrupted; commands may define others.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback as tracebacks
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import (
    App,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from dovetail.cli.frame.config_file import ConfigFile
from dovetail.cli.frame.help_page import FLAG, HelpFormatter
from dovetail.cli.frame.shell_text import shell_message
from dovetail.cli.frame.version import version_text
from dovetail.errors import DovetailError, nearest

if TYPE_CHECKING:
    from dovetail.plugins.metadata.discovery import Candidate

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("bench latency", "dovetail.cli.bench:latency", "Measure one request at a time."),
    ("bench throughput", "dovetail.cli.bench:throughput", "Measure many concurrent requests."),
    ("chat", "dovetail.cli.chat:chat", "Chat with a model."),
    (
        "collect-env",
        "dovetail.cli.collect_env:collect_env",
        "Print facts about this machine for a bug report.",
    ),
    (
        "complete",
        "dovetail.cli.client.complete:complete",
        "Complete a prompt on a server.",
    ),
    ("demo", "dovetail.cli.demo:demo", "Run a small model with different plugins."),
    (
        "config show",
        "dovetail.cli.frame.config_show:show",
        "Show the values of options, and where they come from.",
    ),
    ("generate", "dovetail.cli.generate:generate", "Generate text for prompts."),
    (
        "plugins explain",
        "dovetail.cli.plugins_explain:explain",
        "Explain which plugin is selected, and why.",
    ),
    ("plugins list", "dovetail.cli.plugins_list:list_plugins", "List the installed plugins."),
    ("plugins show", "dovetail.cli.plugins_show:show", "Show the details of one plugin."),
)
"""All commands: the words of each command, its function ("module:function") and its help line."""

GROUPS = {
    "bench": "Measure an engine on random prompts.",
    "config": "Show options.",
    "plugins": "Inspect, check and create plugins.",
}
"""The command groups (first words of commands with two words) and their help lines."""

HOOKS_VARIABLE = "DOVETAIL_HOOKS"
"""The environment variable with the hooks plugins that may add commands, separated by commas."""

_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
"""Errors of a write to standard output. The error of an opened file has a file name."""
_FRAME_OPTIONS = ("--help", "--traceback", "--version")
_MAX_LINES = 3
_MAX_LINE_CHARS = 2000
_SUMMARY = "LLM inference in which every part is a plugin."
_TRACEBACK_HELP = "Print the traceback of an error."


def make_app(*, config: ConfigFile | None = None, show_all: bool = False) -> App:
    """Return the command-line app with all commands, without importing their modules.

    config: reads the file of `--config`. show_all: whether help pages show rare options.
    """
    # `main` turns Ctrl-C into an exit code; the parser would raise SystemExit for it. The strings
    # are plain, because the import of a Markdown parser takes longer than a help page.
    app = App(
        name="dovetail",
        help=_SUMMARY,
        version=version_text,
        config=config or ConfigFile(),
        help_format="plaintext",
        help_formatter=HelpFormatter(show_all=show_all),
    )
    app.suppress_keyboard_interrupt = False
    groups = {name: App(name=name, help=text) for name, text in GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for words, path, text in COMMANDS:
        group_name, _, name = words.rpartition(" ")
        parent = groups[group_name] if group_name else app
        parent.command(path, name=name, help=text)
    return app


def load_app(tokens: Sequence[str], config: ConfigFile) -> App:
    """Return the command-line app, with the installed package's command that `tokens` names."""
    app = make_app(config=config)
    _add_installed(app, tokens)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit code. arguments: None for `sys.argv`."""
    from dovetail.cli.terminal import discard_stdout, prepare_streams

    try:
        prepare_streams()
        return _main(sys.argv[1:] if arguments is None else list(arguments))
    except BrokenPipeError:
        discard_stdout()  # the reader has closed the pipe (`| head`)
        return 0
    except OSError as error:
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        discard_stdout()
        _complain(f"The output cannot be written: {error.strerror}.")
        return 2


def _main(tokens: list[str]) -> int:
    options = tokens[: tokens.index("--")] if "--" in tokens else tokens
    show_all = FLAG in options
    tokens = ["--help" if token == FLAG else token for token in options] + tokens[len(options) :]
    app = make_app(show_all=show_all)
    app.meta.help = _SUMMARY
    try:
        _add_installed(app, [token for token in tokens if token != "--traceback"])
        _let_hooks_register(app, tokens)
    except DovetailError as error:
        if "--traceback" in tokens:
            tracebacks.print_exception(error)
        else:
            _complain(str(error))
        return 2

    own = (*_FRAME_OPTIONS, "-h")
    if tokens and not any(token.partition("=")[0] in own for token in options):
        # The meta app would build the options of the command a second time.
        return _run(app, tokens, traceback=False)

    @app.meta.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        traceback: Annotated[bool, Parameter(negative="", help=_TRACEBACK_HELP)] = False,
    ) -> int:
        """Run one command with its own options."""
        return _run(app, tokens, traceback=traceback)

    # The command interprets the delimiter "--".
    return _guard(app.meta, tokens, delimiter="")


def _add_installed(app: App, tokens: Sequence[str]) -> None:
    """Add installed packages' commands to `app`. Import only the command that `tokens` names."""
    typed = " ".join(tokens) + " "
    built_in = [words for words, *_ in COMMANDS]
    if any(typed.startswith(f"{words} ") for words in built_in):
        return
    # Imported here, because a built-in command does not need it.
    from dovetail.plugins.metadata.commands import find_commands, require_devkit

    usable = find_commands(built_in).usable
    require_devkit(typed, {command.words for command in usable})
    for command in usable:
        plugin, parent = command.plugin, app
        *groups, name = command.words.split()
        for group in groups:
            if group not in parent:
                parent.command(App(name=group, help=f"Commands of {plugin.distribution}."))
            parent = parent[group]
        run: Any = plugin.target
        if typed.startswith(f"{command.words} "):
            run = _load_command(plugin)
        parent.command(run, name=name, help=command.help)


def _load_command(plugin: Candidate) -> Any:
    from dovetail.plugins.loading import Origin, load_target

    origin = Origin(reference=plugin.name, distribution=f"{plugin.distribution} {plugin.version}")
    return load_target(plugin.target, origin)


def _let_hooks_register(app: App, tokens: Sequence[str]) -> None:
    """Let the hooks plugins in `HOOKS_VARIABLE` add their commands to `app`.

    tokens: the command line; its options for plugin rules also apply to these plugins.
    """
    names = [name for name in os.environ.get(HOOKS_VARIABLE, "").split(",") if name.strip()]
    if names:
        from dovetail.plugins import PluginPolicy, PluginRegistry
        from dovetail.plugins.hooks import load_hooks  # slow to import

        policy = PluginPolicy(
            no_plugins="--no-plugins" in tokens, trust_local_code="--trust-local-code" in tokens
        )
        registry = PluginRegistry(policy=policy)
        load_hooks([name.strip() for name in names], registry).notify("register_cli", app=app)


def _run(app: App, tokens: Sequence[str], *, traceback: bool) -> int:
    from dovetail.cli.terminal import show_downloads

    try:
        with show_downloads():
            return _guard(app, tokens, delimiter="--")
    except DovetailError as error:
        if traceback:
            tracebacks.print_exception(error)
        else:
            _complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


def _guard(app: App, tokens: Sequence[str], *, delimiter: str) -> int:
    """Run `app` and return its exit code. Print command-line errors."""
    try:
        result = app(
            list(tokens),
            exit_on_error=False,
            print_error=False,
            verbose=False,
            result_action="return_value",
            end_of_options_delimiter=delimiter,
        )
    except CycloptsError as error:
        _complain(f"{explain(error)}\nTry '{_words_of(app, tokens)} --help'.")
        return 2
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _words_of(app: App, tokens: Sequence[str]) -> str:
    """Return the words of the command in `tokens`, such as "dovetail plugins list"."""
    chain, _, _ = app.parse_commands(list(tokens))
    return " ".join(("dovetail", *chain))


def explain(error: CycloptsError) -> str:
    """Return the message for an error in the command line, with the most similar valid word."""
    words = error.unused_tokens or []
    if isinstance(error, UnknownCommandError) and words and words[0].startswith("-"):
        return f"Unknown option: {words[0]}.{nearest(words[0], _FRAME_OPTIONS)}"
    error.verbose = False
    if isinstance(error, UnusedCliTokensError) and words:
        return f'Unexpected argument: "{words[0]}".'
    if isinstance(error, UnknownOptionError):
        name = (error.token.keyword or error.token.value).lstrip("-").upper()
        if name in {argument.name for argument in error.argument_collection}:
            command = " ".join(error.command_chain or ())
            return f'Command "{command}" takes {name} as an argument, without an option.'
    message = str(error)
    if "Did you mean" in message:
        return message
    if isinstance(error, UnknownCommandError) and words:
        similar = [name for name in _all_commands() if name.split()[1:] == words[:1]]
        if similar:
            choices = " or ".join(f'"{name}"' for name in similar)
            return f'Unknown command "{words[0]}". Did you mean {choices}?'
    if isinstance(error, MissingArgumentError) and error.keyword is None:
        argument, command = error.argument, " ".join(error.command_chain or ())
        if argument is not None and not argument.tokens:
            return f'Command "{command}" needs {argument.name}.'
    return message


def _all_commands() -> list[str]:
    """Return the words of all commands, also of installed packages."""
    from dovetail.plugins.metadata.commands import find_commands

    built_in = [words for words, *_ in COMMANDS]
    return [*built_in, *(command.words for command in find_commands(built_in).usable)]


def _complain(message: str) -> None:
    """Write `message` to stderr in at most three lines.

    Control characters are escaped, because a message may contain names from a model's files.
    """
    from dovetail.cli.terminal import printable

    lines = [line for line in shell_message(message).splitlines() if line.strip()] or [
        "The command failed."
    ]
    if len(lines) > _MAX_LINES:
        hidden = len(lines) - _MAX_LINES + 1
        lines = [*lines[: _MAX_LINES - 1], f"… and {hidden} more lines; --traceback shows them."]
    lines = [printable(line[:_MAX_LINE_CHARS]) for line in lines]
    print("\n".join([f"dovetail: {lines[0]}", *lines[1:]]), file=sys.stderr)

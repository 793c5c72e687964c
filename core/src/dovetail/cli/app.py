"""The entry point of the command line: its commands, errors and exit codes.

A user error prints at most three lines on stderr; `--traceback` shows more. Any other error is a
bug of Dovetail and keeps its traceback. Imports no command, no engine and no tensor library.

Exit codes: 0 success; 2 user error; 130 interrupted; commands may define others.
"""

from __future__ import annotations

import os
import sys
import traceback as tracebacks
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, UnknownCommandError

from dovetail.errors import DovetailError, nearest

COMMANDS: tuple[tuple[str, str, str], ...] = (
    ("bench latency", "dovetail.cli.bench:latency", "Measure one request at a time."),
    ("bench throughput", "dovetail.cli.bench:throughput", "Measure many at once."),
    ("chat", "dovetail.cli.chat:chat", "Talk with a model."),
    ("collect-env", "dovetail.cli.collect_env:collect_env", "Describe this machine, for an issue."),
    ("demo", "dovetail.cli.demo:demo", "Run a small model, twice, with different parts."),
    ("generate", "dovetail.cli.generate:generate", "Answer prompts."),
    ("plugins explain", "dovetail.cli.plugins_explain:explain", "Tell who is chosen, and why."),
    ("plugins list", "dovetail.cli.plugins_list:list_plugins", "List the installed plugins."),
    ("plugins show", "dovetail.cli.plugins_show:show", "Show what is known of one plugin."),
)
"""Every command: its words, "module:function", and one line for `--help`."""

GROUPS = {
    "bench": "Measure an engine on random prompts.",
    "plugins": "Look at plugins, find what is wrong, begin one of your own.",
}
"""Words that stand before other commands, and their line for `--help`."""

HOOKS_VARIABLE = "DOVETAIL_HOOKS"
"""Names, with commas between them, the hooks plugins that may add commands."""

_FRAME_OPTIONS = ("--help", "--traceback", "--version")
_MAX_LINES = 3
_SUMMARY = "LLM inference in which every part is a plugin."
_TRACEBACK_HELP = "Show where an error comes from."


def make_app() -> App:
    """Return the command line with all its commands, without importing them."""
    # Ctrl-C is turned into an exit code by `main`, not into a SystemExit by the parser.
    app = App(name="dovetail", help=_SUMMARY, version=_version)
    app.suppress_keyboard_interrupt = False
    groups = {name: App(name=name, help=text) for name, text in GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for words, path, text in COMMANDS:
        group_name, _, name = words.rpartition(" ")
        parent = groups[group_name] if group_name else app
        parent.command(path, name=name, help=text)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (those of the process if None); return the exit code."""
    app = make_app()
    app.meta.help = _SUMMARY
    tokens = sys.argv[1:] if arguments is None else list(arguments)
    try:
        _add_installed(app, [token for token in tokens if token != "--traceback"])
        _let_hooks_register(app, tokens)
    except DovetailError as error:
        if "--traceback" in tokens:
            tracebacks.print_exception(error)
        else:
            _complain(str(error))
        return 2

    @app.meta.default
    def launch(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        traceback: Annotated[bool, Parameter(negative="", help=_TRACEBACK_HELP)] = False,
    ) -> int:
        """Run one command with all options that are not global."""
        return _run(app, tokens, traceback=traceback)

    # The command interprets the delimiter "--".
    return _guard(app.meta, tokens, delimiter="")


def _add_installed(app: App, tokens: Sequence[str]) -> None:
    """Add the commands of installed packages to `app`; import only the one that is typed."""
    typed = " ".join(tokens) + " "
    built_in = [words for words, *_ in COMMANDS]
    if any(typed.startswith(f"{words} ") for words in built_in):
        return
    # Only if the typed command may be one of those.
    from dovetail.plugins.loading import Origin, load_target
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
            origin = Origin(
                asked=plugin.name, distribution=f"{plugin.distribution} {plugin.version}"
            )
            run = load_target(plugin.target, origin)
        parent.command(run, name=name, help=command.help)


def _let_hooks_register(app: App, tokens: Sequence[str]) -> None:
    """Let the hooks plugins that the environment names add their commands to `app`.

    tokens: what is typed; the user's rules among them hold for these plugins, too.
    """
    names = [name for name in os.environ.get(HOOKS_VARIABLE, "").split(",") if name.strip()]
    if names:
        from dovetail.plugins import PluginPolicy, PluginRegistry
        from dovetail.plugins.hooks import load_hooks  # only for those who have some

        policy = PluginPolicy(
            no_plugins="--no-plugins" in tokens, trust_local_code="--trust-local-code" in tokens
        )
        registry = PluginRegistry(policy=policy)
        load_hooks([name.strip() for name in names], registry).notify("register_cli", app=app)


def _run(app: App, tokens: Sequence[str], *, traceback: bool) -> int:
    try:
        return _guard(app, tokens, delimiter="--")
    except DovetailError as error:
        if traceback:
            tracebacks.print_exception(error)
        else:
            _complain(str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). Python would report it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _guard(app: App, tokens: Sequence[str], *, delimiter: str) -> int:
    """Run `app` and return its exit code; print errors of the command line."""
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
        _complain(f"{_explain(error)}\nTry 'dovetail --help'.")
        return 2
    sys.stdout.flush()
    return result if isinstance(result, int) else 0


def _explain(error: CycloptsError) -> str:
    """Return the error in the command line, with the most similar valid word."""
    words = error.unused_tokens or []
    if isinstance(error, UnknownCommandError) and words and words[0].startswith("-"):
        return f"Unknown option: {words[0]}.{nearest(words[0], _FRAME_OPTIONS)}"
    error.verbose = False
    return str(error)


def _complain(message: str) -> None:
    """Write `message` to stderr in at most three lines."""
    lines = [line for line in message.splitlines() if line.strip()] or ["It failed."]
    if len(lines) > _MAX_LINES:
        hidden = len(lines) - _MAX_LINES + 1
        lines = [*lines[: _MAX_LINES - 1], f"… and {hidden} more lines; --traceback shows them."]
    print("\n".join([f"dovetail: {lines[0]}", *lines[1:]]), file=sys.stderr)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"dovetail {version('dovetail-core')}"
    except PackageNotFoundError:
        return "dovetail (not installed, running from its source)"

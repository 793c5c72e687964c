"""`dovetail chat`: a conversation in the terminal with streamed responses.

Responses are written to stdout and messages to stderr, so that a pipe gets only responses. Ctrl-C
ends a response but not the session; at the prompt it clears the line. Ctrl-D ends the session.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dovetail.cli.chat_session import ChatSession
from dovetail.cli.client.help_lines import API_KEY_FILE_HELP, URL_HELP
from dovetail.cli.engine_options import (
    EngineOptions,
    changed_options,
    engine_args,
    make_optional_model,
)
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.cli.sampling_options import (
    NO_OVERRIDES,
    SETTINGS,
    SamplingOptions,
    named_settings,
)
from dovetail.cli.terminal import (
    Ask,
    keyboard,
    print_message,
    printable,
    read_message,
    read_text_file,
    replace_unencodable,
)
from dovetail.entrypoints.interrupts import watch_for_interrupt
from dovetail.errors import ConfigError, RequestError, nearest
from dovetail.plugins.loading import paused_garbage_collection
from dovetail.tokenizers.template_renderer import TemplateRenderer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.cli.client.remote_session import RemoteSession

    Session = ChatSession | RemoteSession

if TYPE_CHECKING:
    OptionalModelOptions = EngineOptions
    NO_OPTIONS: EngineOptions
else:
    OptionalModelOptions = make_optional_model()
    NO_OPTIONS = OptionalModelOptions()

MAX_TOKENS = 512
_SYSTEM_HELP = "System prompt."
_TEMPLATE_HELP = "File with a chat template that replaces the model's."
_COMMAND = re.compile(r"/[a-z?]*(?=\s|$)")
_HELP = '''\
/params               show the sampling parameters
/params NAME=VALUE …  change parameters: /params temperature=0.2 max_tokens=100
/reset                start a new conversation
/help                 show this help
/exit                 end the session (or Ctrl-D)
A line that ends with \\ continues on the next line; """ opens and closes a block of lines.
Ctrl-C ends a response early.'''


def chat(
    *,
    system: Annotated[str, Parameter(help=_SYSTEM_HELP)] = "",
    chat_template: Annotated[Path | None, Parameter(help=_TEMPLATE_HELP)] = None,
    config: ConfigOption = None,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = NO_OVERRIDES,
    url: Annotated[str | None, Parameter(help=URL_HELP)] = None,
    api_key_file: Annotated[Path | None, Parameter(help=API_KEY_FILE_HELP)] = None,
    engine: Annotated[OptionalModelOptions, Parameter(name="*")] = NO_OPTIONS,
) -> int:
    """Chat with a model, which runs in this process or, with --url, in a server."""
    replace_unencodable()
    if url is not None:
        # Imported here, because a conversation in this process needs no HTTP client.
        from dovetail.cli.client.connection import read_server
        from dovetail.cli.client.remote_session import RemoteSession

        _check_remote(engine, chat_template)
        server = read_server(url, api_key_file)
        model = None if engine.model is None else str(engine.model)
        remote = RemoteSession(server, sampling, model=model, system=system, max_tokens=MAX_TOKENS)
        _start(remote, remote.model)
        return 0
    if engine.model is None or api_key_file is not None:
        raise ConfigError(
            "Specify the model with --model NAME, or the address of a server with --url URL."
        )
    _chat_in_process(engine, sampling, system, _read_template(chat_template))
    return 0


def _check_remote(engine: OptionalModelOptions, chat_template: Path | None) -> None:
    """Raise ConfigError for options that have no effect on a server."""
    invalid = [*changed_options(engine), *(["--chat-template"] if chat_template else [])]
    if invalid:
        raise ConfigError(
            f"{invalid[0]} has no effect with --url. Pass the option to the server: dovetail serve."
        )


def _chat_in_process(
    engine: OptionalModelOptions, sampling: SamplingOptions, system: str, template: str | None
) -> None:
    sampling.check()
    TemplateRenderer().start_child()
    config = engine_args(engine).create_engine_config()
    if config.model.pooler:
        raise ConfigError(
            f"The model {config.model.served_model_name} is a pooling model, which cannot generate "
            "text. Choose a model for chat, or compute embeddings with dovetail serve or LLM.embed."
        )
    with paused_garbage_collection():
        from dovetail.engine.llm_engine import LLMEngine  # slow to import

    llm = LLMEngine(config)
    try:
        params = sampling.apply_to(llm.default_sampling_params(), max_tokens=MAX_TOKENS)
        session = ChatSession(llm, params, system=system, chat_template=template)
        _start(session, llm.config.model.served_model_name)
    finally:
        llm.shutdown()


def _start(session: Session, name: str) -> None:
    if sys.stdin.isatty():
        print_message(f"Type a message to {name}. /help lists the commands.")
    _converse(session, keyboard())


def _converse(session: Session, ask: Ask) -> None:
    continues = True
    while continues:
        try:
            continues = _respond(session, read_message(ask))
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        except KeyboardInterrupt:
            print()
        except RequestError as error:
            # /params reads "none" as None.
            message = str(error).replace(" must be None", " must be none")
            print_message(f"dovetail: {' '.join(message.split())}")


def _respond(session: Session, text: str) -> bool:
    """Respond to a message or execute a command. Return False if the command ends the session."""
    if match := _COMMAND.match(text):
        return _execute(session, match[0], text[match.end() :].strip())
    if text.strip():
        _answer(session, text)
    return True


def _answer(session: Session, text: str) -> None:
    """Print the response to `text` while it is generated."""
    shown = printable if sys.stdout.isatty() else str
    has_notice = False
    with watch_for_interrupt() as interrupted:
        for piece in session.answer(text, interrupted=interrupted):
            if session.num_dropped and not has_notice:
                _print_dropped(session.num_dropped)
                has_notice = True
            print(shown(piece), end="", flush=True)
        print()
        if interrupted():
            print_message("(interrupted)")


def _print_dropped(count: int) -> None:
    print_message(
        "(The conversation exceeds the model's maximum length. Number of oldest messages omitted: "
        f"{count}.)"
    )


def _execute(session: Session, command: str, argument: str) -> bool:
    """Execute a command. Return False if it ends the session.

    Raises RequestError if it is unknown.
    """
    if command == "/exit":
        return False
    act = _ACTIONS.get(command)
    if act is None:
        hint = nearest(command, ["/exit", *_ACTIONS])
        raise RequestError(f"{command!r} is not a command.{hint} /help lists the commands.")
    act(session, argument)
    return True


def _params(session: Session, argument: str) -> None:
    if argument:
        session.set_params(argument)
    for name in named_settings(argument) or SETTINGS:
        print(f"{name:<20} {_written(getattr(session.params, name))}")


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(repr(item) for item in value) or "none"
    return "none" if value is None else str(value)


def _reset(session: Session, argument: str) -> None:
    session.reset()
    print_message("(The conversation was deleted.)")


def _help(session: Session, argument: str) -> None:
    print(_HELP)


_MAX_TEMPLATE_BYTES = 2**20

_ACTIONS: dict[str, Callable[[Session, str], None]] = {
    "/params": _params,
    "/reset": _reset,
    "/help": _help,
}


def _read_template(file: Path | None) -> str | None:
    if file is None:
        return None
    return read_text_file("--chat-template", file, max_bytes=_MAX_TEMPLATE_BYTES)

"""`dovetail complete`: completes a prompt on a server, and prints the text as it arrives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from dovetail.cli.client.connection import first_model, read_server, stream
from dovetail.cli.client.help_lines import API_KEY_FILE_HELP, URL_HELP
from dovetail.cli.sampling_options import NO_OVERRIDES, SamplingOptions
from dovetail.cli.terminal import print_message, printable, read_text_file, replace_unencodable
from dovetail.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
MAX_TOKENS = 64
_PROMPT_HELP = 'Prompt to continue; "-": standard input.'
_MODEL_HELP = "Name of a model of the server; default: the first model that the server lists."


def complete(
    prompt: Annotated[str, Parameter(help=_PROMPT_HELP, allow_leading_hyphen=True)],
    *,
    url: Annotated[str, Parameter(help=URL_HELP)] = DEFAULT_URL,
    api_key_file: Annotated[Path | None, Parameter(help=API_KEY_FILE_HELP)] = None,
    model: Annotated[str | None, Parameter(help=_MODEL_HELP)] = None,
    sampling: Annotated[SamplingOptions, Parameter(name="*")] = NO_OVERRIDES,
) -> int:
    """Complete a prompt on a server."""
    from dovetail.entrypoints.interrupts import watch_for_interrupt  # slow to import

    replace_unencodable()
    text = read_text_file("PROMPT", "-") if prompt == "-" else prompt
    if not text:
        raise ConfigError("The prompt is empty.")
    server = read_server(url, api_key_file)
    body: dict[str, Any] = {"max_tokens": MAX_TOKENS, **sampling.given(), "prompt": text}
    body["model"] = model or first_model(server)
    shown = printable if sys.stdout.isatty() else str
    with watch_for_interrupt() as interrupted:
        for event in stream(server, "/v1/completions", body, interrupted=interrupted):
            print(shown("".join(_texts(event))), end="", flush=True)
        print()
        if interrupted():
            print_message("(interrupted)")
            return 130
    return 0


def _texts(event: dict[str, Any]) -> Iterator[str]:
    for choice in event.get("choices") or ():
        text = choice.get("text") if isinstance(choice, dict) else None
        if isinstance(text, str):
            yield text

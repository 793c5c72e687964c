"""`dovetail top`: shows what a running server does.

Exit codes: 0; 2 if the server cannot be read; 130 after Ctrl-C.
"""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dovetail.cli.client.connection import read_server
from dovetail.cli.client.help_lines import API_KEY_FILE_HELP, URL_HELP
from dovetail.cli.frame.config_file import ConfigOption
from dovetail.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from dovetail_client_tools.engine_steps.reader import StepsReader
    from dovetail_client_tools.top.frame import Picture

DEFAULT_URL = "http://127.0.0.1:8000"
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.2, 3600.0
MIN_LINES = 24
_INTERVAL_HELP = "Seconds between two reads of the server."
_ONCE_HELP = "Print the state after one interval, and exit."
_JSON_HELP = "Print one line of JSON per interval instead of the display."


def top(
    *,
    url: Annotated[str, Parameter(help=URL_HELP)] = DEFAULT_URL,
    api_key_file: Annotated[Path | None, Parameter(help=API_KEY_FILE_HELP)] = None,
    interval_s: Annotated[float, Parameter(help=_INTERVAL_HELP)] = 1.0,
    once: Annotated[bool, Parameter(negative="", help=_ONCE_HELP)] = False,
    json: Annotated[bool, Parameter(negative="", help=_JSON_HELP)] = False,
    config: ConfigOption = None,
) -> int:
    """Show requests, rates, cache use and steps of a running server; q ends the display."""
    if not MIN_INTERVAL_S <= interval_s <= MAX_INTERVAL_S or math.isnan(interval_s):
        raise ConfigError(
            f"--interval-s {interval_s:g} must be between {MIN_INTERVAL_S:g} and "
            f"{MAX_INTERVAL_S:g}."
        )
    from rich.console import Console

    from dovetail_client_tools.engine_steps.reader import StepsReader
    from dovetail_client_tools.http_client.event_loop import run_in_loop

    reader = StepsReader(read_server(url, api_key_file))
    console = Console(highlight=False)
    try:
        if once:
            run_in_loop(lambda: _once(reader, interval_s, console, json))
        else:
            run_in_loop(lambda: _follow(reader, interval_s, console, json))
    except KeyboardInterrupt:
        return 130
    return 0


async def _once(reader: StepsReader, interval_s: float, console: Console, json: bool) -> None:
    from dovetail.clock import MonotonicClock
    from dovetail_client_tools.top.figures import as_json
    from dovetail_client_tools.top.frame import draw
    from dovetail_client_tools.top.top_loop import TopLoop

    try:
        picture = await TopLoop(reader, interval_s, MonotonicClock()).once()
    finally:
        reader.close()
    if json:
        _print(json_format.dumps(as_json(picture)))
    else:
        lines = draw(picture, console.width, max(MIN_LINES, console.height - 1))
        console.print(lines, soft_wrap=True)


async def _follow(reader: StepsReader, interval_s: float, console: Console, json: bool) -> None:
    import asyncio
    import signal

    from dovetail.clock import MonotonicClock
    from dovetail_client_tools.top.screen import quit_key
    from dovetail_client_tools.top.top_loop import TopLoop

    loop = TopLoop(reader, interval_s, MonotonicClock())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, loop.stop.set)
    try:
        with _display(console, json) as show, quit_key(loop.stop):
            await loop.run(show)
    finally:
        reader.close()


@contextmanager
def _display(console: Console, json: bool) -> Iterator[Callable[[Picture], None]]:
    """Yield a function that shows a picture: as JSON, as a line, or on the whole terminal."""
    from dovetail_client_tools.top.figures import as_json, as_line
    from dovetail_client_tools.top.screen import full_screen

    if json:
        yield lambda picture: _print(json_format.dumps(as_json(picture)))
    elif not console.is_terminal:
        yield lambda picture: _print(as_line(picture))
    else:
        with full_screen(console) as show:
            yield show


def _print(line: str) -> None:
    print(line, flush=True)

"""The full-screen display of `dovetail top`. The key q closes it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live

from dovetail_client_tools.top.frame import Picture, draw

QUIT = b"qQ"


@contextmanager
def full_screen(console: Console) -> Iterator[Callable[[Picture], None]]:
    """Yield a function that shows a picture. The earlier content is restored at exit."""
    with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:

        def show(picture: Picture) -> None:
            width, height = console.size
            live.update(draw(picture, width, height), refresh=True)

        yield show


@contextmanager
def quit_key(stop: asyncio.Event) -> Iterator[None]:
    """Set `stop` when q is pressed. Does nothing without a terminal. Needs a running loop."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    loop = asyncio.get_running_loop()

    def read() -> None:
        pressed = os.read(terminal, 64)
        if not pressed or any(key in QUIT for key in pressed):
            stop.set()

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)

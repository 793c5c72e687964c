"""Ctrl-C that waits for the end of a step, so that an interrupted engine lives on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def watch_for_interrupt() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C be asked for instead of raised, so that it cannot break a step in two.

    A second one, before the first was heeded, raises KeyboardInterrupt as always, and so does any
    in a forked child. Outside the main thread, where Python delivers no signals, the answer is
    always no.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    seen = False
    owner_pid = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen or os.getpid() != owner_pid:
            raise KeyboardInterrupt
        seen = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)

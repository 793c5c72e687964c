"""Delays Ctrl-C until the end of a step, so that an interrupted engine remains usable."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def watch_for_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that reports Ctrl-C, instead of raising in the middle of a step.

    A second Ctrl-C, before the function has reported the first, raises KeyboardInterrupt as usual,
    and so does any Ctrl-C in a forked child. Outside the main thread, where Python delivers no
    signals, the function always returns False.
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

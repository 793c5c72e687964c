"""Records calls of Dovetail's functions (`--trace-functions FILE`), to find where a process hangs.

Each line has the time of the engine's clock in nanoseconds, the thread, "call" or "return", and the
function. Recording makes the process many times slower. The file is bounded.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from dovetail.clock import Clock
from dovetail.errors import ConfigError

MAX_LINES = 1_000_000
_PACKAGE = "dovetail"


class FunctionTrace:
    """Records the threads that start after it, and the thread that creates it."""

    def __init__(self, path: str, clock: Clock) -> None:
        """Open the file. Raise ConfigError if it cannot be written."""
        try:
            self._stream = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise ConfigError(f"--trace-functions {path} cannot be written: {error}.") from None
        self._clock = clock
        self._num_left = MAX_LINES
        threading.setprofile(self._record)
        sys.setprofile(self._record)

    def stop(self) -> None:
        """Stop recording, and close the file."""
        threading.setprofile(None)
        sys.setprofile(None)
        self._num_left = 0
        self._stream.close()

    def _record(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "return") or self._num_left <= 0:
            return
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0].startswith(_PACKAGE) and module != __name__:
            self._num_left -= 1
            name = f"{module}.{frame.f_code.co_qualname}"
            thread = threading.current_thread().name
            self._stream.write(f"{self._clock.now_ns()} {thread} {event} {name}\n")

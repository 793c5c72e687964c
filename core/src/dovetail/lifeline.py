"""How a process ends with its parent, in whatever way the parent goes.

The parent holds one end of a socket; its end is the process's end, and that of all that the process
started in its session. Knows nothing of what the process does.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_REMOVALS = 100


def end_with_parent(
    lifeline: socket.socket, folder: Path | None, *, heard: Callable[[], object] | None = None
) -> None:
    """Wait in a thread for the parent's end; then take everything down.

    lifeline: this process's end of the socket. folder: is removed then. heard: is called in the
    thread for each byte that the parent sends.
    """
    # A process that is stopped would not notice: the system wakes it when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)

    def wait() -> None:
        with suppress(ConnectionResetError):
            while lifeline.recv(1):
                if heard is not None:
                    heard()
        if folder is not None:
            _remove(folder)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # the processes that this one started, and itself
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def _remove(folder: Path) -> None:
    for _ in range(_REMOVALS):  # the main thread may be making its sockets there just now
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return

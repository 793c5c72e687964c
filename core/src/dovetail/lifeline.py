"""How a child process ends with its parent, in whatever way the parent goes.

The parent's end is told by its pidfd, which no fork of the parent keeps open, and by the end of a
socket, whose other end the parent holds. The child's end is the end of all that it started in its
session. Knows nothing of what the child does.
"""

from __future__ import annotations

import ctypes
import os
import select
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
    lifeline: socket.socket,
    parent_pid: int,
    folder: Path | None,
    *,
    heard: Callable[[], object] | None = None,
) -> None:
    """Wait in a thread for the parent's end; then take everything down.

    lifeline: this process's end of the socket. parent_pid: the process that started this one.
    folder: is removed then. heard: is called in the thread for each byte that the parent sends.
    """
    # A process that is stopped would not notice: the system wakes it when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    parent = open_pidfd(parent_pid)

    def wait() -> None:
        if os.getppid() == parent_pid:  # else it has ended already, and its id may be another's
            _wait_for_end(lifeline, parent, heard)
        if folder is not None:
            _remove(folder)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # the processes that this one started, and itself
        os._exit(1)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that can be read when the process has ended.

    None for a process that is gone, and where the system offers none (a kernel before 5.3, or a
    filter of system calls): the end of the socket alone tells then.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def hang_up(end: socket.socket) -> None:
    """Close a socket so that the other side notices, though a fork may hold a copy of this end."""
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _wait_for_end(
    lifeline: socket.socket, parent: int | None, heard: Callable[[], object] | None
) -> None:
    """Return when the parent has ended or has closed the socket."""
    poll = select.poll()
    for descriptor in (lifeline.fileno(), parent):
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    while all(descriptor != parent for descriptor, _ in poll.poll()) and _receives(lifeline):
        if heard is not None:
            heard()


def _receives(lifeline: socket.socket) -> bool:
    """Take in a byte; return False if the other end is closed."""
    try:
        return bool(lifeline.recv(1))
    except ConnectionResetError:
        return False


def _remove(folder: Path) -> None:
    for _ in range(_REMOVALS):  # the main thread may be making its sockets there just now
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return

"""Ends a child process with its parent, however the parent ends.

The child detects the parent's end by the parent's pidfd, which no fork of the parent keeps open,
and by the closed control socket, whose other end the parent holds. It then kills all processes
that it started in its session, and itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_REMOVALS = 100
_STACK_BYTES = 256 << 10
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def watch_parent(
    control: socket.socket, parent_pid: int, folder: str, on_message: Callable[[], object]
) -> None:
    """Wait in a thread for the parent's end; then end this process and what it started.

    control: this process's end of the socket. parent_pid: the process that started this one.
    folder: removed then, unless it is "". on_message: called in the thread for each packet.
    """
    # A process that is stopped would not notice: the system continues it when its parent dies.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    parent = open_pidfd(parent_pid)

    def wait() -> None:
        if os.getppid() == parent_pid:  # otherwise it has ended, and its id may be reused
            _wait_for_end(control, parent, on_message)
        if folder:
            _remove(folder)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # the processes that this one started, and itself
        os._exit(1)

    before = threading.stack_size(_STACK_BYTES)
    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    threading.stack_size(before)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that can be read when the process has ended.

    None for a process that has exited, and if the system offers none (a kernel before 5.3, or a
    system-call filter): then only the closed control socket shows it. Raises OSError if no
    descriptor or memory is left.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_RESOURCES:
            raise
        return None


def _wait_for_end(
    control: socket.socket, parent: int | None, on_message: Callable[[], object]
) -> None:
    """Return when the parent has ended or has closed the socket."""
    poll = select.poll()
    for descriptor in (control.fileno(), parent):
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    while all(descriptor != parent for descriptor, _ in poll.poll()) and _receives(control):
        on_message()


def _receives(control: socket.socket) -> bool:
    """Receive a byte; return False if the other end is closed."""
    with suppress(ConnectionResetError):
        return bool(control.recv(1))
    return False


def _remove(folder: str) -> None:
    import shutil  # takes several milliseconds, which sandboxed children save

    for _ in range(_REMOVALS):  # the main thread may be creating its sockets there now
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return

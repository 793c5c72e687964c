"""Kills a child process when its parent exits, whatever the reason.

The child detects the parent's exit in two ways: by the parent's pidfd, and by the closed control
socket, because the parent holds the other end. Then the child kills all processes that it started
in its session, and itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import socket
import sys
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
    """Start a thread that kills this process and its children when the parent exits.

    control: this process's end of the control socket. parent_pid: the process id of the parent.
    folder: a directory to remove when the parent has exited, or "". on_message: called in the
    thread for each packet on the socket.
    """
    if sys.platform == "linux":
        # A stopped process gets SIGCONT when its parent exits, so it can notice.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT, 0, 0, 0)
    parent = open_pidfd(parent_pid)

    def wait() -> None:
        if os.getppid() == parent_pid:  # otherwise the parent has exited and its id may be reused
            _wait_for_end(control, parent, on_message)
        if folder:
            _remove(folder)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # all processes of this session, including this one
        os._exit(1)

    before = threading.stack_size(_STACK_BYTES)
    threading.Thread(target=wait, name="parent-watch", daemon=True).start()
    threading.stack_size(before)


def open_pidfd(pid: int) -> int | None:
    """Return a descriptor that becomes readable when the process has exited.

    Returns None for a process that has exited and on systems without pidfd (macOS, a kernel before
    5.3, or a system-call filter). In these cases only the closed control socket shows that the
    process has exited. Raises OSError if no descriptor or memory is left.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in _NO_RESOURCES:
            raise
        return None


def _wait_for_end(
    control: socket.socket, parent: int | None, on_message: Callable[[], object]
) -> None:
    """Wait until the parent has exited or has closed the socket."""
    poll = select.poll()
    for descriptor in (control.fileno(), parent):
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    while all(descriptor != parent for descriptor, _ in poll.poll()) and _receives(control):
        on_message()


def _receives(control: socket.socket) -> bool:
    """Receive a byte. Return False if the other end is closed."""
    with suppress(ConnectionResetError):
        return bool(control.recv(1))
    return False


def _remove(folder: str) -> None:
    import shutil  # importing it takes several milliseconds

    for _ in range(_REMOVALS):  # the main thread may still create sockets there
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return

"""The main function of a child: reads the boot record and calls the entry point.

This module imports only the standard library, because some children have few packages on their
path.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
from collections.abc import Callable

from dovetail.clock import MonotonicClock
from dovetail.processes.boot import Boot, read_boot
from dovetail.processes.liveness import LivenessWriter
from dovetail.processes.log_output import configure_logs_of_child
from dovetail.processes.parent_death import watch_parent
from dovetail.processes.start_report import StartReport, send_report
from dovetail.transport.remote_error import RemoteError

_DISMISSAL_S = 1.0


class ChildContext:
    """The argument of an entry point. settings: what the parent passed to `start_child`."""

    def __init__(self, boot: Boot, control: socket.socket) -> None:
        """Start watching the parent and writing heartbeats."""
        self.settings = boot.settings
        self._control = control
        self._dismissed = threading.Event()
        watch_parent(control, boot.parent_pid, boot.folder, self._dismissed.set)
        self.liveness = LivenessWriter(boot.liveness, MonotonicClock())

    def enter_phase(self, name: str) -> None:
        """Report that a startup phase begins."""
        send_report(self._control, StartReport("phase", name))

    def ready(self, content: bytes = b"") -> None:
        """Report that startup is complete.

        content: returned by `wait_until_ready` of the parent.
        """
        send_report(self._control, StartReport("ready", content=content))

    def failed(self, error: BaseException) -> None:
        """Report to the parent that this process has failed and exits."""
        remote = RemoteError.of(error)
        send_report(self._control, StartReport("failed", remote.kind, remote.text, remote.detail))

    def await_dismissal(self) -> None:
        """Wait a moment for the parent's permission to exit.

        For a child that exits because its parent closed a connection: if the parent has exited,
        this process must run until it has killed the processes that it started in its session.
        """
        self._dismissed.wait(_DISMISSAL_S)


def main(memory: int) -> int:
    """Run the entry point of the boot record in `memory`. Return the exit status.

    Errors of the entry point are reported to the parent.
    """
    boot = read_boot(memory)
    sys.path[:] = boot.sys_path or sys.path
    configure_logs_of_child(boot.logs)
    for descriptor in (boot.control, *boot.descriptors):
        os.set_inheritable(descriptor, False)
    context = ChildContext(boot, socket.socket(fileno=boot.control))
    try:
        return _load(boot.entry)(context)
    except BaseException as error:
        context.failed(error)
        return 1
    finally:
        context.liveness.stop()


def _load(entry: str) -> Callable[[ChildContext], int]:
    module, _, name = entry.partition(":")
    function: Callable[[ChildContext], int] = getattr(importlib.import_module(module), name)
    return function

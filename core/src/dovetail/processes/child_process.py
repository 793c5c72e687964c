"""The parent's view of one child process: start, reports, heartbeats, exit.

A child is started with exec in its own session, and the whole session is killed. It belongs to the
process that started it: a forked copy of the parent cannot use or kill it. Its resources are
released by `close`, when the object is collected, or when the interpreter exits.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dovetail.clock import Clock, MonotonicClock
from dovetail.errors import DovetailError, EngineDeadError
from dovetail.machine import read_system_file
from dovetail.processes.affinity import unbound_thread
from dovetail.processes.boot import Boot
from dovetail.processes.liveness import LivenessReader
from dovetail.processes.log_output import LogOutput
from dovetail.processes.ownership import finalize_in_owner, on_fork_in_child
from dovetail.processes.parent_death import open_pidfd
from dovetail.processes.start_report import StartReport, receive_report
from dovetail.transport.packets import packet_pair
from dovetail.transport.remote_error import RemoteError
from dovetail.transport.ring_memory import memory_of
from dovetail.transport.wakeup_socket import hang_up

END_TIMEOUT_S = 5.0
"""Maximum time to wait until a killed process has exited."""
FIRST_PHASE = "start"
"""The phase of a child before its first report."""

_ISOLATED_PROGRAM = (
    "import sys, json\n"
    "sys.path += json.loads(sys.argv[1])\n"
    "from dovetail.processes.child_main import main\n"
    "sys.exit(main(int(sys.argv[2])))\n"
)


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """The environment of a child that processes untrusted data.

    It replaces the parent's environment. The child runs in "/" without stdout, and `sys_path` is
    its only import path besides the standard library.
    """

    sys_path: list[str]
    environment: Mapping[str, str]


def start_child(
    entry: str,
    settings: bytes = b"",
    *,
    name: str,
    descriptors: Sequence[int] = (),
    folder: str = "",
    isolation: Isolation | None = None,
    clock: Clock | None = None,
) -> ChildProcess:
    """Start a process that calls `entry`, "module:function", with a `ChildContext`.

    settings: bytes for the entry point. name: name of the child in messages. descriptors: inherited
    with the same numbers; the caller closes its own copies. folder: a directory that the child
    removes if its parent exits. The child gets this process's import path and working directory, or
    "/" if the directory was deleted. Raises OSError or CapacityError if the system cannot create
    the process, memory or a descriptor.
    """
    with ExitStack() as undo, ExitStack() as passed:
        liveness = LivenessReader(clock or MonotonicClock())
        passed.callback(os.close, liveness.descriptor)
        control, child_end = packet_pair()
        undo.callback(control.close)
        passed.callback(child_end.close)
        boot = Boot(
            entry=entry,
            parent_pid=os.getpid(),
            control=child_end.fileno(),
            liveness=liveness.descriptor,
            folder=folder,
            sys_path=import_path() if isolation is None else [],
            descriptors=list(descriptors),
            logs=LogOutput.for_children,
            settings=settings,
        )
        process = _spawn(boot, isolation)
        undo.callback(process.wait)
        undo.callback(process.kill)
        child = ChildProcess(name, process, control, liveness)
        undo.pop_all()
    return child


class ChildProcess:
    """A child process, created by `start_child`.

    phase: the last reported phase of its startup; "" when it is ready. content: the content of its
    "ready" report; None before.
    """

    def __init__(
        self,
        name: str,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        liveness: LivenessReader,
    ) -> None:
        control.setblocking(False)
        self.name = name
        self.phase = FIRST_PHASE
        self.content: bytes | None = None
        self.liveness = liveness
        self._process = process
        self.control = control
        self._pidfd = open_pidfd(process.pid)
        self._end = finalize_in_owner(self, _end, process, control, liveness, self._pidfd)
        on_fork_in_child(self._disown)

    def __str__(self) -> str:
        """Return the child's name and process id, for messages."""
        return f"{self.name} (process {self.pid})"

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def ending(self) -> int:
        """A descriptor that becomes readable when the process has exited.

        On systems without pidfd it is the descriptor of the control socket.
        """
        return self.control.fileno() if self._pidfd is None else self._pidfd

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called or the owner has exited."""
        return not self._end.alive

    def receive(self) -> StartReport | None:
        """Process the next report and return it, or None if there is none.

        Does not wait. Raises MessageError for anything that is not a report.
        """
        report = receive_report(self.control)
        if report is not None and report.kind == "phase":
            self.phase = report.name
        elif report is not None and report.kind == "ready":
            self.content, self.phase = report.content, ""
        return report

    def wait_until_ready(self, phase_timeout_s: float, clock: Clock | None = None) -> bytes:
        """Wait until the child is ready. Return the content of its "ready" report.

        phase_timeout_s: time limit of each startup phase. Raises the error that the child
        reported, or EngineDeadError if the child exited without a report or a phase took too long.
        The attribute `phase` of the error is the child's startup phase.
        """
        clock = clock or MonotonicClock()
        phase, begun_ns = self.phase, clock.now_ns()
        while self.content is None:
            left_s = phase_timeout_s - (clock.now_ns() - begun_ns) / 1e9
            if left_s <= 0:
                raise self._in_phase(
                    EngineDeadError(
                        f"{self} made no progress within {phase_timeout_s:g} s; check its "
                        "output, or raise start_timeout_s."
                    )
                )
            wait_readable([self.control.fileno(), self.ending], left_s)
            report = self.receive()
            if report is not None and report.kind == "failed":
                raise self._in_phase(error_of(report))
            if report is None and self.has_ended():
                raise self._in_phase(EngineDeadError(f"{self} ended {self.describe_end()}."))
            if self.phase != phase:
                phase, begun_ns = self.phase, clock.now_ns()
        return self.content

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s` seconds. Return whether the process has exited."""
        if self.is_closed:
            return True
        if self._pidfd is not None:
            return bool(wait_readable([self._pidfd], timeout_s))
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def describe_end(self) -> str:
        """Return how the process ended, such as "by SIGKILL" or "with status 1".

        Waits for the process to exit, but does not reap it if the system can avoid that, so that no
        other process can get its id.
        """
        status = self._process.returncode
        if status is None and not hasattr(os, "waitid"):  # macOS before Python 3.13
            status = self._process.wait()
        if status is None:
            exit_info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            if exit_info is None:
                return "with an unknown exit status"
            status = (
                exit_info.si_status if exit_info.si_code == os.CLD_EXITED else -exit_info.si_status
            )
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"

    def dismiss(self) -> None:
        """Permit the process to exit. The parent will kill the processes of its session."""
        with suppress(OSError):
            self.control.send(b"!")

    def kill(self) -> None:
        """Kill all processes of the child's session. May be called from any thread."""
        kill_session(self._process)

    def kill_tree(self) -> None:
        """Kill the child's session and its children, which have their own sessions.

        Its children would exit by themselves, unless a signal has stopped them.
        """
        for child in _children_of(self.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.kill()

    def close(self) -> None:
        """Kill the session, wait for it to exit, and close everything. May be called twice.

        Does nothing in a forked copy of the parent.
        """
        self._end()

    def _in_phase(self, error: DovetailError) -> DovetailError:
        error.phase = error.phase or self.phase
        return error

    def _disown(self) -> None:
        """Close the socket in a forked copy of the parent, which must not wait for the child."""
        self.control.close()
        self._process.returncode = 0


def error_of(report: StartReport, owner: str = "") -> DovetailError:
    """Return the error of a "failed" report. owner: a prefix of its text."""
    return RemoteError(report.name, report.text, report.detail).error(owner)


def import_path() -> list[str]:
    """Return `sys.path` with absolute entries, for another process.

    Relative entries are omitted if the working directory was deleted.
    """
    here = _working_directory()
    return [os.path.abspath(entry) for entry in sys.path if here or os.path.isabs(entry)]


def wait_readable(descriptors: Sequence[int], timeout_s: float | None) -> list[int]:
    """Wait at most `timeout_s` seconds. Return the descriptors that can be read."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [
        descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)
    ]


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of a child's session.

    The child is not reaped yet, so no other process can have its id.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _spawn(boot: Boot, isolation: Isolation | None) -> subprocess.Popen[bytes]:
    memory = memory_of(boot.encode())
    try:
        if isolation is None:
            command = ["-P", "-m", "dovetail.processes", boot.entry, str(memory)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(boot.sys_path)}
        else:
            path = json.dumps(isolation.sys_path)
            command = ["-I", "-S", "-B", "-c", _ISOLATED_PROGRAM, path, str(memory)]
            environment = dict(isolation.environment)
        with unbound_thread():
            return subprocess.Popen(
                [sys.executable, *command],
                pass_fds=(memory, boot.control, boot.liveness, *boot.descriptors),
                stdin=subprocess.DEVNULL,
                stdout=None if isolation is None else subprocess.DEVNULL,
                start_new_session=True,
                cwd=None if isolation is None and _working_directory() else os.sep,
                env=environment,
            )
    finally:
        os.close(memory)


def _end(
    process: subprocess.Popen[bytes],
    control: socket.socket,
    liveness: LivenessReader,
    pidfd: int | None,
) -> None:
    kill_session(process)
    with suppress(subprocess.TimeoutExpired):  # otherwise the process hangs in the kernel
        process.wait(END_TIMEOUT_S)
    hang_up(control)
    liveness.close()
    if pidfd is not None:
        os.close(pidfd)


def _children_of(pid: int) -> list[int]:
    """Return the ids of the children of a process; empty if the system does not report them."""
    lines = [read_system_file(str(path)) for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for line in lines for child in line.split()]


def _working_directory() -> str:
    """Return the working directory, or "" if it was deleted or cannot be named."""
    try:
        return os.getcwd()
    except OSError:
        return ""

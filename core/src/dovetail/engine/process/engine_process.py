"""An engine core in its own process, as its parent sees it: start, send, receive, end.

The process's end is told by its pidfd, so that nobody waits for a dead engine. The process has a
session of its own, which is killed as a whole: nothing that the engine started survives it, and its
folder is removed. Owns process, sockets and folder, in the process that made it: a forked child can
neither use nor end them. Any thread may send and close while one receives, which is to stop before.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import zmq

from dovetail import errors
from dovetail.child_process import import_path, kill_session, reap, start_child
from dovetail.clock import Clock, MonotonicClock
from dovetail.config import EngineConfig
from dovetail.engine.process.boot import INPUT_SOCKET, OUTPUT_SOCKET, Boot, address, write_boot
from dovetail.engine.process.vital_signs import VitalsReader, make_vitals
from dovetail.errors import DovetailError, EngineDeadError, MessageError
from dovetail.faults import fault
from dovetail.lifeline import hang_up, open_pidfd
from dovetail.machine import read_system_file
from dovetail.process_owner import finalize_in_owner, forked_error, on_fork_in_child
from dovetail.transport.messages import (
    Died,
    FromEngine,
    Heartbeat,
    Message,
    Ready,
    Stop,
    front_end_reader,
    pack,
)
from dovetail.transport.private_folder import make_private_folder

START_GRACE_S = 15.0
"""How much longer than the engine itself its parent waits for a phase of the start."""

HEARTBEAT_S = 1.0
STOP_TIMEOUT_S = 5.0
_DRAIN_MS = 100
_LOOK_S = 1.0
_RECONNECT_MS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an engine has come.

    num_steps: steps done, num_refused: messages that were none, as of its last heartbeat.
    age_s: seconds since it, or the quietest of its workers, showed life; a long step is no silence.
    step_s: seconds that a step has been under way; 0.0 if none is.
    """

    num_steps: int = 0
    num_refused: int = 0
    age_s: float = 0.0
    step_s: float = 0.0


class EngineProcess:
    """A running engine.

    ready: what it said when it was. error: what it died of, or that it was shut down; None while
    it is not known to be dead.
    """

    error: DovetailError | None = None

    def __init__(
        self,
        config: EngineConfig,
        *,
        start_timeout_s: float | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Clock | None = None,
    ) -> None:
        """Start it and wait until it is ready.

        start_timeout_s: for each phase of its start; None for a little more than the configuration
        allows it, so that it can tell by itself what takes so long.
        Raises the DovetailError that its start raised, or EngineDeadError if it ended otherwise or
        was not ready in time. Nothing is left of it then.
        """
        self._clock: Clock = clock or MonotonicClock()
        self._folder = make_private_folder()
        boot = Boot(config.model_dump_json(), import_path(), heartbeat_s)
        self._lifeline, theirs = socket.socketpair()
        vitals = make_vitals()
        self._vitals = VitalsReader(vitals, self._clock)
        with theirs:
            self._process = _spawn(self._folder, boot, self._lifeline, (theirs.fileno(), vitals))
        self._links = _Links()
        self._tear_down = finalize_in_owner(
            self, _tear_down, self._links, self._process, self._lifeline, self._vitals, self._folder
        )
        self._owner_pid = os.getpid()
        self._sending = threading.Lock()
        on_fork_in_child(self._disown)
        self._links.open(self._process.pid)
        self._inbox, self._outbox = self._links.inbox, self._links.outbox
        self._poller = zmq.Poller()
        self._poller.register(self._outbox, zmq.POLLIN)
        ending = self._links.ending
        self._ending = self._lifeline.fileno() if ending is None else ending
        self._poller.register(self._ending, zmq.POLLIN)
        self._reader = front_end_reader()
        self._heartbeat = Heartbeat(0, 0)
        self._why = ""
        try:
            self._connect(self._inbox, INPUT_SOCKET)
            self._connect(self._outbox, OUTPUT_SOCKET)
            phase_s = config.parallel.start_timeout_s + START_GRACE_S
            self.ready = self._wait_until_ready(start_timeout_s or phase_s)
        except BaseException:
            self._tear_down()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    @property
    def folder(self) -> Path:
        """The folder that its sockets lie in."""
        return self._folder

    @property
    def progress(self) -> Progress:
        """How far it has come, as of what was received; its signs of life are those of now."""
        ages = self._vitals.ages()
        return Progress(
            num_steps=self._heartbeat.num_steps,
            num_refused=self._heartbeat.num_refused,
            age_s=max(ages.process_s, ages.workers_s),
            step_s=ages.step_s,
        )

    def send(self, message: Message) -> None:
        """Send a message; never waits.

        Raises MessageError if it cannot travel, EngineDeadError if the engine is known to be dead.
        """
        content = pack(message)
        self._check_open()
        with self._sending:
            self._check_open()  # another thread may have closed it meanwhile
            fault("client.send")
            try:
                self._inbox.send(content)
            except zmq.ZMQError:
                self._check_open()
                raise

    def receive(self, timeout_s: float | None = None) -> FromEngine | None:
        """Return the next message, or None if none came within `timeout_s`; None waits for ever.

        Heartbeats are kept, not returned. Raises EngineDeadError, now and from then on, when the
        engine has died and all that it said before has been read.
        """
        self._check_open()
        start_ns = self._clock.now_ns()
        while True:
            wait_ms = None
            if timeout_s is not None:
                waited_s = (self._clock.now_ns() - start_ns) / 1e9
                wait_ms = max(0, int(1000 * (timeout_s - waited_s)))
            try:
                message = self._receive(wait_ms)
            except zmq.ZMQError:
                self._check_open()
                raise
            if not isinstance(message, Heartbeat):
                return message
            self._heartbeat = message

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the process has ended; wait for it, `timeout_s` seconds at most."""
        if not self._tear_down.alive:
            return True
        end = select.poll()
        end.register(self._ending, select.POLLIN)
        return bool(end.poll(1000 * timeout_s))

    def kill(self, why: str) -> None:
        """End the engine at once, for a reason that its error will tell; from any thread."""
        self._why = why
        # Workers have sessions of their own, and end by themselves, unless they are stopped.
        for child in _children_of(self.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        kill_session(self._process)

    def close(self) -> None:
        """End the engine, gently if it listens; nothing is left of it. May be called twice.

        Does nothing in a forked child of the process that started it.
        """
        if not self._tear_down.alive or os.getpid() != self._owner_pid:
            return
        with self._sending:
            if self.error is None:
                self.error = EngineDeadError("the engine was shut down; make a new one.")
                fault("client.stop")
                self._inbox.send(pack(Stop()))
                self.has_ended(STOP_TIMEOUT_S)
            self._tear_down()

    def _disown(self) -> None:
        """In a forked child: let every call fail, and keep no end of the lifeline."""
        self.error = forked_error("this engine", self._owner_pid)
        self._lifeline.close()

    def _connect(self, end: zmq.Socket[bytes], name: str) -> None:
        end.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)  # until the process has bound it
        end.setsockopt(zmq.SNDHWM, 0)
        fault("client.connect")
        end.connect(address(self._folder, name))

    def _wait_until_ready(self, timeout_s: float) -> Ready:
        message, phase, begun_ns = None, "", self._clock.now_ns()
        while message is None and (self._clock.now_ns() - begun_ns) / 1e9 < timeout_s:
            message = self.receive(min(timeout_s, _LOOK_S))
            if self._vitals.phase() != phase:
                phase, begun_ns = self._vitals.phase(), self._clock.now_ns()
        if isinstance(message, Ready):
            return message
        if message is None:
            late = EngineDeadError(
                f"the engine's process {self.pid} got no further within {timeout_s:g} s; see what "
                "it printed, or raise start_timeout_s."
            )
            late.phase = phase
            raise late
        raise MessageError(f"the engine began with a {type(message).__name__}, not with Ready.")

    def _check_open(self) -> None:
        """Raise what the engine died of, or that it was shut down.

        It is torn down without `close` where the interpreter ends, or the garbage collector takes
        it, while somebody still uses it: in an exit hook, a daemon thread, a `__del__`.
        """
        if self.error is None and not self._tear_down.alive:
            self.error = EngineDeadError("the engine was shut down; make a new one.")
        if self.error is not None:
            raise self.error

    def _receive(self, wait_ms: int | None) -> FromEngine | None:
        """Return the next message, or None if none came."""
        events = dict(self._poller.poll(wait_ms))
        # What a dead process has said may still be on its way through ZMQ's own thread.
        if self._outbox not in events and events and not self._outbox.poll(_DRAIN_MS):
            raise self._died()
        return self._read() if events else None

    def _read(self) -> FromEngine:
        fault("client.receive")
        message = self._reader.read(self._outbox.recv())
        if isinstance(message, Died):
            self.error = error_of(message.kind, message.reason, message.digest)
            raise self.error
        return message

    def _died(self) -> EngineDeadError:
        kill_session(self._process)
        status = self._process.wait()
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        why = f" ({self._why})" if self._why else ""
        self.error = EngineDeadError(
            f"the engine's process {self.pid} ended {how}{why}; the requests under way are lost. "
            "Make a new engine."
        )
        self.error.phase = self._vitals.phase()
        return self.error


class _Links:
    """The sockets to an engine's process, and the descriptor that tells of its end.

    ending: None where the system offers none; the lifeline alone tells then.
    """

    context: zmq.Context[zmq.Socket[bytes]] | None = None
    ending: int | None = None

    def open(self, pid: int) -> None:
        """Make the sockets; `close` closes what there is, should this fail half-way."""
        self.ending = open_pidfd(pid)
        self.context = zmq.Context()
        self.context.linger = 0  # of all its sockets: to close them never waits for the engine
        self.inbox = self.context.socket(zmq.PUSH)
        self.outbox = self.context.socket(zmq.PULL)

    def close(self) -> None:
        """Close all, unsent messages too; never waits. In any thread, while none uses them."""
        if self.context is not None:
            self.context.destroy(linger=0)
        if self.ending is not None:
            os.close(self.ending)
        self.context = self.ending = None


def error_of(kind: str, reason: str, digest: str = "") -> DovetailError:
    """Return the error that another process told of; one of an unknown class is the root's."""
    if kind == EngineDeadError.__name__:
        return EngineDeadError(reason, digest=digest)
    found = getattr(errors, kind, None)
    known = isinstance(found, type) and issubclass(found, DovetailError)
    made: DovetailError = found(reason) if known else DovetailError(reason)  # type: ignore[misc]
    return made


def _spawn(
    folder: Path, boot: Boot, mine: socket.socket, descriptors: tuple[int, int]
) -> subprocess.Popen[bytes]:
    """Start the process; leave nothing behind if that fails.

    descriptors: its end of the lifeline, and the memory for its signs of life, closed here.
    """
    try:
        fault("client.boot")
        write_boot(folder, boot)
        fault("client.spawn")
        return start_child(
            "dovetail.engine.process",
            str(folder),
            str(os.getpid()),
            *map(str, descriptors),
            descriptors=descriptors,
        )
    except BaseException:
        mine.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(descriptors[1])


def _children_of(pid: int) -> list[int]:
    """Return the processes that a process has started; nothing where the system does not tell."""
    told = [read_system_file(str(path)) for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for line in told for child in line.split()]


def _tear_down(
    links: _Links,
    process: subprocess.Popen[bytes],
    lifeline: socket.socket,
    vitals: VitalsReader,
    folder: Path,
) -> None:
    kill_session(process)
    links.close()
    reap(process)
    hang_up(lifeline)
    vitals.close()
    shutil.rmtree(folder, ignore_errors=True)

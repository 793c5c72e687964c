"""An engine core in its own process, as its parent sees it: start, send, receive, end.

Owns the child process, its sockets and their folder, in the process that made it: a forked child
can neither use nor end them. Nobody waits for a dead engine, since its pidfd is polled with the
socket. Any thread may send and close while one receives, which has to stop before.
"""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq

from dovetail import errors
from dovetail.clock import Clock, MonotonicClock
from dovetail.config import RequestedConfig
from dovetail.engine.process.boot import INPUT_SOCKET, OUTPUT_SOCKET, EngineBoot, address
from dovetail.errors import DovetailError, EngineDeadError, MessageError
from dovetail.faults import fault
from dovetail.processes.child_process import ChildProcess, start_child
from dovetail.processes.ownership import finalize_in_owner, forked_error, on_fork_in_child
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
from dovetail.transport.wire_types import encode

START_GRACE_S = 15.0
"""How much longer than the engine itself its parent waits for a phase of the start."""

HEARTBEAT_S = 1.0
STOP_TIMEOUT_S = 5.0
_DRAIN_MS = 100
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
        config: RequestedConfig,
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
        self._links = _Links()
        try:
            self._child = _start(self._folder, config, heartbeat_s, self._clock)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._tear_down = finalize_in_owner(
            self, _tear_down, self._links, self._child, self._folder
        )
        self._owner_pid = os.getpid()
        self._sending = threading.Lock()
        on_fork_in_child(self._disown)
        self._reader = front_end_reader()
        self._heartbeat = Heartbeat(0, 0)
        self._why = ""
        try:
            self._links.open()
            self._inbox, self._outbox = self._links.inbox, self._links.outbox
            self._poller = zmq.Poller()
            self._poller.register(self._outbox, zmq.POLLIN)
            self._poller.register(self._child.ending, zmq.POLLIN)
            self._connect(self._inbox, INPUT_SOCKET)
            self._connect(self._outbox, OUTPUT_SOCKET)
            phase_s = start_timeout_s or config.parallel.start_timeout_s + START_GRACE_S
            ready = self._reader.read(self._child.wait_until_ready(phase_s, self._clock))
            if not isinstance(ready, Ready):
                raise MessageError(f"The engine began with a {type(ready).__name__}, not a Ready.")
            self.ready = ready
        except BaseException:
            self._tear_down()
            raise

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def folder(self) -> Path:
        """The folder that its sockets lie in."""
        return self._folder

    @property
    def progress(self) -> Progress:
        """How far it has come, as of what was received; its signs of life are those of now."""
        liveness = self._child.liveness.read()
        return Progress(
            num_steps=liveness.num_steps,
            num_refused=self._heartbeat.num_refused,
            age_s=liveness.silence_s,
            step_s=liveness.step_s,
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
        return self._child.has_ended(timeout_s)

    def kill(self, why: str) -> None:
        """End the engine at once, for a reason that its error will tell; from any thread."""
        self._why = why
        self._child.kill_tree()

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
        """In a forked child: let every call fail."""
        self.error = forked_error("this engine", self._owner_pid)

    def _connect(self, end: zmq.Socket[bytes], name: str) -> None:
        end.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)  # until the process has bound it
        end.setsockopt(zmq.SNDHWM, 0)
        fault("client.connect")
        end.connect(address(self._folder, name))

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
        self._child.kill()  # what else runs in its session
        how = self._child.describe_end()
        why = f" ({self._why})" if self._why else ""
        self.error = EngineDeadError(
            f"the engine's process {self.pid} ended {how}{why}; the requests under way are lost. "
            "Make a new engine."
        )
        self.error.phase = self._child.phase
        return self.error


class _Links:
    """The sockets to an engine's process."""

    context: zmq.Context[zmq.Socket[bytes]] | None = None

    def open(self) -> None:
        """Make the sockets; `close` closes what there is, should this fail half-way."""
        self.context = zmq.Context()
        self.context.linger = 0  # of all its sockets: to close them never waits for the engine
        self.inbox = self.context.socket(zmq.PUSH)
        self.outbox = self.context.socket(zmq.PULL)

    def close(self) -> None:
        """Close all, unsent messages too; never waits. In any thread, while none uses them."""
        if self.context is not None:
            self.context.destroy(linger=0)
        self.context = None


def error_of(kind: str, reason: str, digest: str = "") -> DovetailError:
    """Return the error that another process told of; one of an unknown class is the root's."""
    if kind == EngineDeadError.__name__:
        return EngineDeadError(reason, digest=digest)
    found = getattr(errors, kind, None)
    known = isinstance(found, type) and issubclass(found, DovetailError)
    made: DovetailError = found(reason) if known else DovetailError(reason)  # type: ignore[misc]
    return made


def _start(folder: Path, config: RequestedConfig, heartbeat_s: float, clock: Clock) -> ChildProcess:
    fault("client.boot")
    boot = EngineBoot(config.model_dump_json(), str(folder), heartbeat_s)
    fault("client.spawn")
    return start_child(
        "dovetail.engine.process.child:serve",
        encode(boot),
        name="the engine",
        folder=str(folder),
        clock=clock,
    )


def _tear_down(links: _Links, child: ChildProcess, folder: Path) -> None:
    child.close()
    links.close()
    shutil.rmtree(folder, ignore_errors=True)

"""The sockets between one front end and an engine's process.

One socket sends, the other receives, so that two threads can use them. Both have the same random
identity, by which the engine identifies this front end. A pidfd reports that the process has
exited, so that no caller waits for a failed engine. Any thread may send and close while another
thread receives.
"""

from __future__ import annotations

import os
import select
import threading
from abc import ABC, abstractmethod
from pathlib import Path

import zmq

from dovetail.clock import Clock
from dovetail.engine.channel import Progress
from dovetail.engine.process.boot import INPUT_SOCKET, OUTPUT_SOCKET, address
from dovetail.errors import DovetailError, EngineDeadError
from dovetail.faults import fault
from dovetail.transport.messages import (
    Failed,
    FromEngine,
    Heartbeat,
    Message,
    Ready,
    front_end_reader,
    pack,
)

OWNER = b"owner"
"""The identity of the front end that started the engine; other front ends have random ones."""

_DRAIN_MS = 100
_RECONNECT_MS = 5


class Sockets:
    """The sockets to an engine's process.

    ending: a pidfd of the process, closed with the sockets, or None.
    """

    context: zmq.Context[zmq.Socket[bytes]] | None = None
    ending: int | None = None

    def open(self, folder: Path, name: bytes) -> None:
        """Create and connect the sockets. After an error, call `close`."""
        self.context = zmq.Context()
        self.context.linger = 0  # closing the sockets never waits for the engine
        self.to_engine = self._connect(folder, INPUT_SOCKET, name)
        self.from_engine = self._connect(folder, OUTPUT_SOCKET, name)

    def close(self) -> None:
        """Close all sockets, and drop unsent messages.

        Any thread may call it if no other thread uses them.
        """
        if self.context is not None:
            self.context.destroy(linger=0)
        if self.ending is not None:
            os.close(self.ending)
        self.context = self.ending = None

    def _connect(self, folder: Path, file: str, name: bytes) -> zmq.Socket[bytes]:
        assert self.context is not None
        end = self.context.socket(zmq.DEALER)
        end.setsockopt(zmq.ROUTING_ID, name)
        # ZMQ retries until the process has bound its socket.
        end.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        end.setsockopt(zmq.SNDHWM, 0)
        fault("client.connect")
        end.connect(address(folder, file))
        return end


class EngineLink(ABC):
    """The connection of one front end to an engine's process.

    error: why the engine stopped, or that it was shut down; None while the process is not known to
    have exited. ready: the engine's first message. heartbeat: the last heartbeat. folder: the
    directory of the sockets.
    """

    error: DovetailError | None = None
    pid: int
    ready: Ready

    def __init__(self, folder: Path, clock: Clock) -> None:
        """Prepare the link. Subclasses then call `open_sockets`."""
        self.folder = folder
        self.heartbeat = Heartbeat(0, 0)
        self.clock = clock
        self._sockets = Sockets()
        self._ending: int | None = None
        self._sending = threading.Lock()
        self._reader = front_end_reader()

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the sockets can be used."""

    @property
    @abstractmethod
    def progress(self) -> Progress:
        """The progress of the engine."""

    @abstractmethod
    def close(self) -> None:
        """Release what this front end owns. May be called twice, and from any thread."""

    @abstractmethod
    def died(self) -> DovetailError:
        """Return the error for a process that has exited without a report."""

    def open_sockets(self, name: bytes) -> None:
        """Connect the sockets."""
        self._sockets.open(self.folder, name)
        self._poller = zmq.Poller()
        self._poller.register(self._sockets.from_engine, zmq.POLLIN)

    def watch_process(self, pid: int, ending: int | None) -> None:
        """Detect from now on when the process exits.

        ending: a descriptor that becomes readable when the process exits; None if the system
        offers none.
        """
        self.pid = pid
        self._ending = ending
        if ending is not None:
            self._poller.register(ending, zmq.POLLIN)

    def send(self, message: Message) -> None:
        """Send a message. Never waits.

        Raises MessageError if it cannot be sent, EngineDeadError if the engine is known to have
        failed.
        """
        content = pack(message)
        self.check_open()
        with self._sending:
            self.check_open()  # another thread may have closed the link meanwhile
            fault("client.send")
            try:
                self._sockets.to_engine.send(content)
            except zmq.ZMQError:
                self.check_open()
                raise

    def receive(self, timeout_s: float | None = None) -> FromEngine | None:
        """Return the next message, or None if none arrived within `timeout_s` (None: no limit).

        Heartbeats are recorded. After the last message of a failed engine, this and every later
        call raises EngineDeadError.
        """
        self.check_open()
        wait_ms = None if timeout_s is None else max(0, int(1000 * timeout_s))
        try:
            message = self._receive(wait_ms)
        except zmq.ZMQError:
            self.check_open()
            raise
        if isinstance(message, Heartbeat):
            self.heartbeat = message
        return message

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        """Return whether the process has exited. Wait for it, `timeout_s` seconds at most."""
        if not self.is_open:
            return True
        if self._ending is None:
            return self.error is not None
        end = select.poll()
        end.register(self._ending, select.POLLIN)
        return bool(end.poll(1000 * timeout_s))

    def check_open(self) -> None:
        """Raise the error that stopped the engine, or an error that says that it was shut down.

        At interpreter exit or garbage collection the link is closed without `close`, even if an
        exit hook, a daemon thread or a `__del__` still uses it.
        """
        if self.error is None and not self.is_open:
            self.error = shut_down_error()
        if self.error is not None:
            raise self.error

    def _receive(self, wait_ms: int | None) -> FromEngine | None:
        """Return the next message, or None if no message arrived."""
        from_engine = self._sockets.from_engine
        events = dict(self._poller.poll(wait_ms))
        # Messages of a process that has exited may still be in ZMQ's own thread.
        if from_engine not in events and events and not from_engine.poll(_DRAIN_MS):
            self.error = self.died()
            raise self.error
        return self._read() if events else None

    def _read(self) -> FromEngine:
        fault("client.receive")
        message = self._reader.read(self._sockets.from_engine.recv())
        if isinstance(message, Failed):
            self.error = message.error.error()
            raise self.error
        return message


def shut_down_error() -> DovetailError:
    """Return the error for the use of a client after its shutdown."""
    return EngineDeadError("the engine was shut down; create a new one.")

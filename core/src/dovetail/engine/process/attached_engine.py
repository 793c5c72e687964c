"""Connects an additional front end to an engine that another process has started.

The front end connects to the engine's sockets, at the address that the engine's owner gives it. It
detaches without shutting down the engine, and owns only its own sockets.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

import zmq

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.channel import Progress
from dovetail.engine.process.boot import INPUT_SOCKET
from dovetail.engine.process.engine_process import HEARTBEAT_S
from dovetail.engine.process.link import EngineLink, Sockets, shut_down_error
from dovetail.errors import ConfigError, EngineDeadError, MessageError
from dovetail.machine import read_system_file
from dovetail.processes.ownership import finalize_in_owner, forked_error, on_fork_in_child
from dovetail.processes.parent_death import open_pidfd
from dovetail.transport.messages import Detach, FromEngine, Hello, Ready, pack
from dovetail.value_checks import shorten

_HELLO_S = 0.05
_LINGER_MS = 200


class AttachedEngine(EngineLink):
    """A running engine that belongs to another process."""

    def __init__(self, address: str, *, timeout_s: float, clock: Clock | None = None) -> None:
        """Attach to the engine whose socket has the path `address`.

        Raises ConfigError if no socket of this user exists there, EngineDeadError if no engine
        responds within `timeout_s` seconds.
        """
        clock = clock or MonotonicClock()
        super().__init__(_folder_of(address), clock)
        self._heard_ns = clock.now_ns()
        self._tear_down = finalize_in_owner(self, Sockets.close, self._sockets)
        self._owner_pid = os.getpid()
        on_fork_in_child(self._disown)
        try:
            self.open_sockets(secrets.token_bytes(16))
            self.ready = self._send_hello(address, timeout_s)
            self._sockets.ending = open_pidfd(self.ready.pid)
            self.watch_process(self.ready.pid, self._sockets.ending)
        except BaseException:
            self._tear_down()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the connection is open."""
        return bool(self._tear_down.alive)

    @property
    def progress(self) -> Progress:
        """The progress of the engine, as of its last heartbeat.

        age_s is 0 unless the engine's process is stopped, because this front end receives no
        heartbeats during a step.
        """
        silent_s = (self.clock.now_ns() - self._heard_ns) / 1e9 if _is_stopped(self.pid) else 0.0
        return Progress(
            num_steps=self.heartbeat.num_steps,
            num_rejected=self.heartbeat.num_rejected,
            age_s=max(0.0, silent_s - HEARTBEAT_S),
        )

    def receive(self, timeout_s: float | None = None) -> FromEngine | None:
        """Return the next message, or None if no message arrived. Record when it arrived."""
        message = super().receive(timeout_s)
        if message is not None:
            self._heard_ns = self.clock.now_ns()
        return message

    def died(self) -> EngineDeadError:
        """Return the error for an exited engine process. Only its owner knows the cause."""
        return EngineDeadError(
            f"the engine's process {self.pid} ended; unfinished requests are lost. Attach to "
            "another engine."
        )

    def close(self) -> None:
        """Detach from the engine, which aborts this front end's requests. May be called twice."""
        if not self.is_open or os.getpid() != self._owner_pid:
            return
        with self._sending:
            if self.error is None:
                self.error = shut_down_error()
                self._sockets.to_engine.setsockopt(zmq.LINGER, _LINGER_MS)
                self._sockets.to_engine.send(pack(Detach()))
            self._tear_down()

    def _disown(self) -> None:
        """Make every later call raise an error. Runs in a forked child."""
        self.error = forked_error("this client", self._owner_pid)

    def _send_hello(self, address: str, timeout_s: float) -> Ready:
        """Send Hello until the engine responds.

        The first messages may arrive before the engine's other socket is ready.
        """
        begun_ns = self.clock.now_ns()
        while (self.clock.now_ns() - begun_ns) / 1e9 < timeout_s:
            self.send(Hello())
            message = self.receive(_HELLO_S)
            if isinstance(message, Ready):
                return message
            if message is not None:
                raise MessageError(
                    f"the engine's first message was {type(message).__name__} instead of Ready."
                )
        raise EngineDeadError(f"No engine responded at {address!r} within {timeout_s:g} s.")


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, for example by SIGSTOP, or False if unknown."""
    return read_system_file(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] == ["T"]


def _folder_of(address: object) -> Path:
    """Return the directory of an engine's sockets.

    Raises ConfigError unless `address` is a socket of an engine of this user.
    """
    if not isinstance(address, str) or not address:
        raise ConfigError(f"address={shorten(address)} must be the path of an engine's socket.")
    path = Path(address)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"address={shorten(address)} cannot be used ({error}). Pass the `address` of an engine "
            "that runs in a separate process on this machine."
        ) from None
    if not stat.S_ISSOCK(status.st_mode) or path.name != INPUT_SOCKET:
        raise ConfigError(f"address={shorten(address)} is not the socket of an engine.")
    if status.st_uid != os.getuid():
        raise ConfigError(f"address={shorten(address)} belongs to another user.")
    return path.parent

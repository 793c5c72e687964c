"""Starts, kills and shuts down an engine core in its own process. Used by the parent process.

This module owns the child process, its sockets and their directory, in the process that started it:
a forked child can neither use nor release them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dovetail.clock import Clock, MonotonicClock
from dovetail.config import RequestedConfig
from dovetail.engine.channel import Progress
from dovetail.engine.process.boot import EngineBoot
from dovetail.engine.process.link import OWNER, EngineLink, Sockets, shut_down_error
from dovetail.errors import EngineDeadError, MessageError
from dovetail.faults import fault
from dovetail.processes.child_process import ChildProcess, start_child
from dovetail.processes.ownership import finalize_in_owner, forked_error, on_fork_in_child
from dovetail.transport.messages import Ready, Stop, front_end_reader, pack
from dovetail.transport.private_folder import make_private_folder
from dovetail.transport.wire_types import encode

START_GRACE_S = 15.0
"""Seconds that the parent waits for a startup phase in addition to the engine's timeout."""

HEARTBEAT_S = 1.0
STOP_TIMEOUT_S = 5.0


class EngineProcess(EngineLink):
    """A running engine that this process has started."""

    def __init__(
        self,
        config: RequestedConfig,
        *,
        start_timeout_s: float | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Clock | None = None,
    ) -> None:
        """Start the process and wait until it is ready.

        start_timeout_s: timeout of each startup phase; None for a little more than the
        configuration's timeout, so that the engine itself can report the slow phase.
        Raises the DovetailError that the process reported, or EngineDeadError if the process exited
        without a report or was not ready in time. After an error all resources are released.
        """
        clock = clock or MonotonicClock()
        super().__init__(make_private_folder(), clock)
        try:
            self._child = _start(self.folder, config, heartbeat_s, clock)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self._tear_down = finalize_in_owner(
            self, _tear_down, self._sockets, self._child, self.folder
        )
        self._owner_pid = os.getpid()
        on_fork_in_child(self._disown)
        self._why = ""
        try:
            self.open_sockets(OWNER)
            self.watch_process(self._child.pid, self._child.ending)
            phase_s = start_timeout_s or config.parallel.start_timeout_s + START_GRACE_S
            ready = front_end_reader().read(self._child.wait_until_ready(phase_s, clock))
            if not isinstance(ready, Ready):
                raise MessageError(
                    f"The engine's first message was {type(ready).__name__} instead of Ready."
                )
            self.ready = ready
        except BaseException:
            self._tear_down()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the process and its sockets exist."""
        return bool(self._tear_down.alive)

    @property
    def progress(self) -> Progress:
        """The progress of the engine, with its current heartbeats."""
        liveness = self._child.liveness.read()
        return Progress(
            num_steps=liveness.num_steps,
            num_rejected=self.heartbeat.num_rejected,
            age_s=liveness.silence_s,
            step_s=liveness.step_s,
        )

    def died(self) -> EngineDeadError:
        """Return the error for a process that has exited, with the reason. Kill its children."""
        self._child.kill()  # kills the other processes of its session
        how = self._child.describe_end()
        why = f" ({self._why})" if self._why else ""
        error = EngineDeadError(
            f"the engine's process {self.pid} ended {how}{why}; unfinished requests are lost. "
            "Create a new engine."
        )
        error.phase = self._child.phase
        return error

    def kill(self, why: str) -> None:
        """Kill the engine. why: the reason, for the error. Any thread may call this method."""
        self._why = why
        self._child.kill_tree()

    def close(self) -> None:
        """Shut down the engine with a message; kill it if it does not exit. Free all resources.

        May be called twice. Does nothing in a forked child of the process that started it.
        """
        if not self.is_open or os.getpid() != self._owner_pid:
            return
        with self._sending:
            if self.error is None:
                self.error = shut_down_error()
                fault("client.stop")
                self._sockets.to_engine.send(pack(Stop()))
                self.has_ended(STOP_TIMEOUT_S)
            self._tear_down()

    def _disown(self) -> None:
        """Make every later call raise an error. Runs in a forked child."""
        self.error = forked_error("this engine", self._owner_pid)


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


def _tear_down(sockets: Sockets, child: ChildProcess, folder: Path) -> None:
    child.close()
    sockets.close()
    shutil.rmtree(folder, ignore_errors=True)

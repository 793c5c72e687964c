"""The owner of an engine's processes: watches them, and starts another engine when one dies.

Holds the client of the engine that runs, which ends with all its processes when it is shut down or
killed. One thread looks for the engine's end, though nobody calls it, and kills one that shows no
sign of life for long; another, while there is none, starts the next. Both hold the supervisor only
weakly, so that one that is dropped ends. Knows which requests are under way, since they are lost
with their engine. What a client can do but end, it does not know.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.process.engine_process import EngineProcess, Progress
from dovetail.engine.supervision.crash_tracker import CrashTracker
from dovetail.engine.supervision.restarts import Restarts
from dovetail.engine.supervision.rules import EngineState, SupervisionRules
from dovetail.errors import DovetailError, EngineDeadError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, Finished, PauseScope
from dovetail.processes.ownership import finalize_in_owner, forked_error, on_fork_in_child
from dovetail.request import EngineCoreRequest, FinishReason

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_JOIN_S = 30.0
_NORMAL_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


class OwnedClient(Protocol):
    """What a supervisor asks of a client; both clients of an engine's process are one."""

    process: EngineProcess

    @property
    def progress(self) -> Progress:
        """How far the engine has come."""

    def find_end(self) -> DovetailError | None:
        """Return what the engine died of, or None if it lives or another thread will notice."""

    def restore_pause(self, scope: PauseScope) -> None:
        """Pause a new engine before it is given requests; do not wait for it."""

    def shutdown(self) -> None:
        """End the engine. May be called twice, and in any thread."""


C = TypeVar("C", bound=OwnedClient)


class Supervisor(Generic[C]):
    """One engine after the other. May be used by several threads.

    num_restarts: engines started after the first. on_change: called, in a thread, when an engine
    died, when there is a new one, or will be none. paused: how far the next engine is paused when
    it starts. lost: the ends of the requests that engines died with, to be taken out by the client.
    """

    def __init__(
        self,
        make: Callable[[], C],
        *,
        rules: SupervisionRules,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine, in this thread; raise what its start raises."""
        self.num_restarts = 0
        self.on_change: Callable[[], None] = _nothing
        self.paused: PauseScope | None = None
        self.lost: deque[EngineCoreOutputs] = deque()
        self._make = make
        self._rules = rules
        clock = clock or MonotonicClock()
        self._restarts = Restarts(rules, clock)
        self._crashes = CrashTracker(rules, clock)
        self._under_way: dict[str, tuple[str, EngineCoreRequest]] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._final: EngineDeadError | None = None
        self._starter: threading.Thread | None = None
        self._owner_pid = os.getpid()
        self._client: C | None = make()
        self._killed: C | None = None
        finalize_in_owner(self, self._closing.set)
        on_fork_in_child(self._disown)
        self._watch = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._closing),
            name="engine-watch",
            daemon=True,
        )
        self._watch.start()

    @property
    def state(self) -> EngineState:
        """How the engine is."""
        self._bury_dead()
        with self._changed:
            if self._final is not None:
                return EngineState.DEAD
            client = self._client
        if client is None or client.process.has_ended():
            return EngineState.RESTARTING
        progress = client.progress
        silent = progress.age_s > self._rules.max_silence_s
        stuck = progress.step_s > self._rules.max_step_s
        return EngineState.STALLED if silent or stuck else EngineState.READY

    @property
    def error(self) -> EngineDeadError | None:
        """Why there is no engine, and will be none; None while there may be one."""
        return self._final

    def client(self) -> C:
        """Return the client of the engine that runs.

        Raises UnavailableError while there is none, EngineDeadError if there will be none.
        """
        with self._changed:
            if self._final is not None:
                raise self._final.with_traceback(None)
            if self._client is None:
                raise UnavailableError(
                    "the engine died and is being started again; nothing was done. Ask again."
                )
            return self._client

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is an engine; return whether there is. Raises EngineDeadError."""
        self._bury_dead()
        with self._changed:
            self._changed.wait_for(
                lambda: self._client is not None or self._final is not None, timeout_s
            )
            if self._final is not None:
                raise self._final.with_traceback(None)
            return self._client is not None

    def admit(self, user_id: str, request: EngineCoreRequest) -> None:
        """Note that a request is under way.

        Raises RequestError if engines have died of it, UnavailableError if it has to wait for
        another one of which they may have died.
        """
        with self._changed:
            self._crashes.admit(user_id, request)
            self._under_way[request.request_id] = user_id, request

    def dismiss(self, request_id: str, *, is_normal: bool = False) -> None:
        """Note that a request has ended, by itself (`is_normal`) or not, or was refused."""
        with self._changed:
            found = self._under_way.pop(request_id, None)
            if found is not None:
                self._crashes.record_end(*found, is_normal=is_normal)

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Note the requests that ended in a step."""
        for ending in outputs.finished:
            self.dismiss(ending.request_id, is_normal=ending.reason in _NORMAL_ENDS)

    def lose(self, client: C, error: DovetailError) -> None:
        """Bury an engine that died of `error`; put the ends of what was under way into `lost`.

        Begins to start another one. Does nothing if that engine was buried before.
        """
        with self._changed:
            if client is not self._client:
                return
            self._client = None
            lost = dict(self._under_way)
            self._under_way.clear()
            was_killed = client is not self._killed and "SIGKILL" in _first_line(error)
            by_request = self._crashes.blames_request([*lost.values()], was_killed=was_killed)
            delay_s = self._restarts.next_delay_s(is_by_request=by_request)
            self._crashes.restarts_left = self._restarts.num_left
            self._crashes.record_death(lost.values(), was_killed=was_killed)
            if lost:
                self.lost.append(_ends(lost, error))
        client.shutdown()
        logger.error("The engine died with %d requests under way: %s", len(lost), error)
        if not self._closing.is_set():
            self._begin(delay_s, _first_line(error))
        self.on_change()

    def shutdown(self) -> None:
        """End the engine; one that is being started is ended as soon as it can be. Twice is fine.

        Waits for that, half a minute at most.
        """
        self._closing.set()
        with self._changed:
            self._final = self._final or EngineDeadError(
                "the engine was shut down; make a new one."
            )
            client, self._client = self._client, None
            self._changed.notify_all()
        if client is not None:
            client.shutdown()
        for thread in (self._watch, self._starter):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _begin(self, delay_s: float | None, reason: str) -> None:
        if delay_s is None:
            self._give_up(reason)
            return
        self._starter = threading.Thread(
            target=_start_again,
            args=(weakref.ref(self), self._make, self._closing, delay_s),
            name="engine-starter",
            daemon=True,
        )
        self._starter.start()

    def _install(self, client: C) -> None:
        """Let a new engine take requests, paused as the last one was."""
        with self._changed:
            wanted = not self._closing.is_set()
            if wanted:
                if self.paused is not None:
                    client.restore_pause(self.paused)
                self._client = client
                self.num_restarts += 1
                self._changed.notify_all()
        if not wanted:
            client.shutdown()
            return
        logger.warning("The engine was started again, in process %d.", client.process.pid)
        self.on_change()

    def _fail_to_start(self, error: Exception) -> float | None:
        """Return how long to wait before the next attempt; give up and return None for none."""
        logger.error("The engine could not be started again: %s", error)
        delay_s = self._restarts.next_delay_s()
        if delay_s is None:
            self._give_up(_first_line(error))
        return delay_s

    def _disown(self) -> None:
        """In a forked child: let every call fail, and take no lock that a thread may have held."""
        self._final = forked_error("this engine", self._owner_pid)
        self._client = None
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._closing.set()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._final = self._final or EngineDeadError(
                f"the engine died {self._restarts.num_deaths} times within "
                f"{self._rules.window_s:g} s and is not started again; at last: {reason}"
            )
            self._changed.notify_all()
        self.on_change()

    def _bury_dead(self) -> C | None:
        """Return the client of the engine that runs; bury one that has ended unnoticed."""
        client = self._client
        if client is None or not client.process.has_ended():
            return client
        error = client.find_end()
        if error is not None:
            self.lose(client, error)
        return None

    def _look(self) -> None:
        """Bury an engine that has ended; kill one that has done nothing for too long."""
        client = self._bury_dead()
        if client is None:
            return
        why = self._why_kill(client.progress)
        if why and client is not self._killed:
            self._killed = client
            logger.error("The engine is killed: %s.", why)
            client.process.kill(why)

    def _why_kill(self, progress: Progress) -> str:
        if progress.age_s > self._rules.kill_silence_s:
            return f"it has shown no life for {progress.age_s:.0f} s"
        if progress.step_s > self._rules.kill_step_s:
            return f"a step has not ended within {progress.step_s:.0f} s"
        return ""


def _watch(reference: weakref.ref[Supervisor[C]], closing: threading.Event) -> None:
    """In a thread: look after the engine, as long as anybody has its supervisor."""
    while not closing.wait(_LOOK_S):
        supervisor = reference()
        if supervisor is None:
            return
        supervisor._look()
        del supervisor


def _start_again(
    reference: weakref.ref[Supervisor[C]],
    make: Callable[[], C],
    closing: threading.Event,
    delay_s: float | None,
) -> None:
    """In a thread: start an engine; if it fails, once more, until it is enough."""
    while not closing.wait(delay_s):
        client, failure = None, None
        try:
            client = make()
        except Exception as error:
            failure = error
        supervisor = reference()
        if supervisor is None:
            return  # and the engine goes with its client
        if client is not None:
            supervisor._install(client)
            return
        assert failure is not None
        delay_s = supervisor._fail_to_start(failure)
        if delay_s is None:
            return
        del supervisor, failure


def _ends(
    lost: dict[str, tuple[str, EngineCoreRequest]], error: DovetailError
) -> EngineCoreOutputs:
    message = f"EngineDeadError: {_first_line(error)}"
    return EngineCoreOutputs(
        finished=tuple(
            Finished(request_id=name, reason=FinishReason.ERROR, message=message) for name in lost
        )
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _nothing() -> None:
    return

"""The owner of an engine's processes: watches them, and starts another engine when one dies.

Holds the client of the engine that runs, which ends with all its processes when it is shut down or
killed. A thread looks at the signs of life and kills an engine that shows none for long; another
one, while there is none, starts the next. Knows what requests are under way, since they are lost
with their engine, and what a client can do but end: nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.process.engine_process import EngineProcess, Progress
from dovetail.engine.supervision.restarts import Restarts
from dovetail.engine.supervision.rules import EngineState, SupervisionRules
from dovetail.engine.supervision.suspects import Suspects
from dovetail.errors import DovetailError, EngineDeadError, UnavailableError
from dovetail.interfaces import EngineCoreOutputs, Finished
from dovetail.request import FinishReason

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_JOIN_S = 30.0


class OwnedClient(Protocol):
    """What a supervisor asks of a client; both clients of an engine's process are one."""

    process: EngineProcess

    @property
    def progress(self) -> Progress:
        """How far the engine has come."""

    def shutdown(self) -> None:
        """End the engine. May be called twice."""


C = TypeVar("C", bound=OwnedClient)


class Supervisor(Generic[C]):
    """One engine after the other. May be used by several threads.

    num_restarts: engines started after the first. on_change: called, in a thread, when there is a
    new engine, or will be none.
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
        self._make = make
        self._rules = rules
        self._restarts = Restarts(rules, clock or MonotonicClock())
        self._suspects = Suspects(rules.max_deaths)
        self._under_way: dict[str, None] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._final: EngineDeadError | None = None
        self._starter: threading.Thread | None = None
        self._client: C | None = make()
        self._watch = threading.Thread(target=self._look, name="engine-watch", daemon=True)
        self._watch.start()

    @property
    def state(self) -> EngineState:
        """How the engine is."""
        with self._changed:
            if self._final is not None:
                return EngineState.DEAD
            client = self._client
        if client is None:
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
        with self._changed:
            self._changed.wait_for(
                lambda: self._client is not None or self._final is not None, timeout_s
            )
            if self._final is not None:
                raise self._final.with_traceback(None)
            return self._client is not None

    def admit(self, request_id: str) -> None:
        """Note that a request is under way; raise RequestError if engines have died with it."""
        with self._changed:
            self._suspects.check(request_id)
            self._under_way[request_id] = None

    def dismiss(self, request_id: str) -> None:
        """Note that a request has ended, or was aborted."""
        self._under_way.pop(request_id, None)

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Note the requests that ended in a step."""
        for ending in outputs.finished:
            self._under_way.pop(ending.request_id, None)

    def lose(self, client: C, error: DovetailError) -> EngineCoreOutputs | None:
        """Bury an engine that died of `error`; return the end of all that was under way.

        Begins to start another one. None if that engine was buried before.
        """
        with self._changed:
            if client is not self._client:
                return None
            self._client = None
            lost = list(self._under_way)
            self._under_way.clear()
            self._suspects.accuse(lost)
        client.shutdown()
        delay_s = self._restarts.next_delay_s()
        reason = str(error).partition("\n")[0]
        logger.error("The engine died with %d requests under way: %s", len(lost), error)
        if not self._closing.is_set():
            self._begin(delay_s, reason)
        message = f"EngineDeadError: {reason}"
        return EngineCoreOutputs(
            finished=tuple(
                Finished(request_id=name, reason=FinishReason.ERROR, message=message)
                for name in lost
            )
        )

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
            target=self._start_again, args=(delay_s,), name="engine-starter", daemon=True
        )
        self._starter.start()

    def _start_again(self, delay_s: float | None) -> None:
        """In a thread: start an engine; if it fails, once more, until it is enough."""
        while not self._closing.wait(delay_s):
            try:
                client = self._make()
            except Exception as error:
                logger.error("The engine could not be started again: %s", error)
                delay_s = self._restarts.next_delay_s()
                if delay_s is None:
                    self._give_up(str(error).partition("\n")[0])
                    return
                continue
            self._install(client)
            return

    def _install(self, client: C) -> None:
        with self._changed:
            wanted = not self._closing.is_set()
            if wanted:
                self._client = client
                self.num_restarts += 1
                self._changed.notify_all()
        if not wanted:
            client.shutdown()
            return
        logger.warning("The engine was started again, in process %d.", client.process.pid)
        self.on_change()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._final = self._final or EngineDeadError(
                f"the engine died {self._restarts.num_deaths} times within "
                f"{self._rules.window_s:g} s and is not started again; at last: {reason}"
            )
            self._changed.notify_all()
        self.on_change()

    def _look(self) -> None:
        """In a thread: kill an engine that has shown no life, or done no step, for too long."""
        killed: C | None = None
        while not self._closing.wait(_LOOK_S):
            client = self._client
            if client is None or client is killed:
                continue
            why = self._why_kill(client.progress)
            if why:
                killed = client
                logger.error("The engine is killed: %s.", why)
                client.process.kill(why)

    def _why_kill(self, progress: Progress) -> str:
        if progress.age_s > self._rules.kill_silence_s:
            return f"it has shown no life for {progress.age_s:.0f} s"
        if progress.step_s > self._rules.kill_step_s:
            return f"a step has not ended within {progress.step_s:.0f} s"
        return ""


def _nothing() -> None:
    return

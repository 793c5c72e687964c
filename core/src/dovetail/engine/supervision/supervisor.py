"""The owner of an engine's processes: watches them, and starts another engine when one dies.

Holds the channel to the engine that runs, which ends with all its processes when it is shut down or
killed. One thread looks for the engine's end, though nobody calls it, and kills one that shows no
sign of life for long; another, while there is none, starts the next. Both hold the supervisor only
weakly, so that one that is dropped ends. What is under way in an engine is in its `Work`.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable

from dovetail.clock import Clock, MonotonicClock
from dovetail.engine.channel import Call, EngineState, Progress, Received, Reply
from dovetail.engine.port import EnginePort
from dovetail.engine.process.channel import ProcessChannel
from dovetail.engine.process.engine_process import EngineProcess
from dovetail.engine.supervision.restarts import Restarts
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.engine.supervision.work import Work
from dovetail.errors import DovetailError, EngineDeadError, UnavailableError
from dovetail.interfaces import PauseScope
from dovetail.processes.ownership import finalize_in_owner, forked_error, on_fork_in_child

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_JOIN_S = 30.0
_PAUSE_S = 10.0
"""How long a new engine may take to pause as the last one was."""


class Supervisor:
    """One engine after the other. May be used by several threads.

    num_restarts: engines started after the first. paused: how far the next engine is paused when it
    starts.
    """

    def __init__(
        self,
        start: Callable[[], ProcessChannel],
        work: Work,
        rules: SupervisionRules,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine, in this thread; raise what its start raises."""
        self.num_restarts = 0
        self.paused: PauseScope | None = None
        self._start = start
        self._work = work
        self._rules = rules
        self._clock = clock or MonotonicClock()
        self._restarts = Restarts(rules, self._clock)
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._closing = threading.Event()
        self._final: EngineDeadError | None = None
        self._starter: threading.Thread | None = None
        self._owner_pid = os.getpid()
        self._channel: ProcessChannel | None = start()
        self._killed: ProcessChannel | None = None
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
            channel = self._channel
        if channel is None or channel.link.has_ended():
            return EngineState.RESTARTING
        progress = channel.progress
        silent = progress.age_s > self._rules.max_silence_s
        stuck = progress.step_s > self._rules.max_step_s
        return EngineState.STALLED if silent or stuck else EngineState.READY

    @property
    def error(self) -> EngineDeadError | None:
        """Why there is no engine, and will be none; None while there may be one."""
        return self._final

    def channel(self) -> ProcessChannel:
        """Return the channel to the engine that runs.

        Raises UnavailableError while there is none, EngineDeadError if there will be none.
        """
        with self._changed:
            if self._final is not None:
                raise self._final.with_traceback(None)
            if self._channel is None:
                raise UnavailableError(
                    "the engine died and is being started again; nothing was done. Ask again."
                )
            return self._channel

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is an engine; return whether there is. Raises EngineDeadError."""
        self._bury_dead()
        with self._changed:
            self._changed.wait_for(
                lambda: self._channel is not None or self._final is not None, timeout_s
            )
            if self._final is not None:
                raise self._final.with_traceback(None)
            return self._channel is not None

    def find_channel(self) -> ProcessChannel | None:
        """Return the channel to the engine that runs, or None."""
        return self._channel

    def is_current(self, channel: ProcessChannel) -> bool:
        """Return whether this is the engine that runs."""
        return channel is self._channel

    def receive(self, timeout_s: float | None) -> Received | None:
        """Return the next message of the engine, or of one that died; None if none came in time.

        While an engine is started it waits like for outputs. Raises EngineDeadError.
        """
        begun_ns = self._clock.now_ns()
        while not self._work.lost:
            left_s = timeout_s
            if timeout_s is not None:
                left_s = max(0.0, timeout_s - (self._clock.now_ns() - begun_ns) / 1e9)
            try:
                channel = self._channel if self.wait(left_s) else None
            except EngineDeadError:
                if self._work.lost:
                    break
                raise
            if channel is None and timeout_s is not None and not left_s:
                return None
            if channel is not None:
                message, is_lost = self._receive(channel, left_s)
                if not is_lost:
                    return message
        return self._work.lost.popleft()

    def _receive(
        self, channel: ProcessChannel, timeout_s: float | None
    ) -> tuple[Received | None, bool]:
        """Return the next message of an engine, and whether it died instead."""
        try:
            with self._reading:
                message = channel.receive(timeout_s)
            return (None if message is None else self._work.note(message)), False
        except EngineDeadError as error:
            self.lose(channel, error)
            return None, True

    def lose(self, channel: ProcessChannel, error: DovetailError) -> None:
        """Bury an engine that died of `error`; what was under way is lost.

        Begins to start another one. Does nothing if that engine was buried before.
        """
        with self._changed:
            if channel is not self._channel:
                return
            self._channel = None
            self.paused = channel.paused
            was_killed = channel is not self._killed and "SIGKILL" in _first_line(error)
            by_request = self._work.blames_request(was_killed=was_killed)
            delay_s = self._restarts.next_delay_s(is_by_request=by_request)
            num_lost = self._work.lose(
                _first_line(error), was_killed=was_killed, restarts_left=self._restarts.num_left
            )
        channel.close()
        logger.error("The engine died with %d requests under way: %s", num_lost, error)
        if not self._closing.is_set():
            self._begin(delay_s, _first_line(error))

    def shutdown(self) -> None:
        """End the engine; one that is being started is ended as soon as it can be. Twice is fine.

        Waits for that, half a minute at most.
        """
        self._closing.set()
        with self._changed:
            self._final = self._final or EngineDeadError(
                "the engine was shut down; make a new one."
            )
            channel, self._channel = self._channel, None
            self._changed.notify_all()
        if channel is not None:
            channel.close()
        for thread in (self._watch, self._starter):
            if thread is not None and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _begin(self, delay_s: float | None, reason: str) -> None:
        if delay_s is None:
            self._give_up(reason)
            return
        self._starter = threading.Thread(
            target=_start_again,
            args=(weakref.ref(self), self._start, self._closing, delay_s),
            name="engine-starter",
            daemon=True,
        )
        self._starter.start()

    def _install(self, channel: ProcessChannel) -> None:
        """Let a new engine take requests."""
        with self._changed:
            wanted = not self._closing.is_set()
            if wanted:
                self._channel = channel
                self.num_restarts += 1
                self._changed.notify_all()
        if not wanted:
            channel.close()
            return
        logger.warning("The engine was started again, in process %d.", channel.process_id)

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
        self._channel = None
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._closing = threading.Event()
        self._closing.set()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._final = self._final or EngineDeadError(
                f"the engine died {self._restarts.num_deaths} times within "
                f"{self._rules.window_s:g} s and is not started again; at last: {reason}"
            )
            self._changed.notify_all()

    def _bury_dead(self) -> ProcessChannel | None:
        """Return the channel of the engine that runs; bury one that has ended unnoticed."""
        channel = self._channel
        if channel is None or not channel.link.has_ended():
            return channel
        error = self._find_end(channel)
        if error is not None:
            self.lose(channel, error)
        return None

    def _find_end(self, channel: ProcessChannel) -> DovetailError | None:
        """Return what an engine that has ended died of; keep what it said before.

        None if another thread is reading: it will notice.
        """
        if not self._reading.acquire(blocking=False):
            return None
        try:
            while (message := channel.receive(0)) is not None:
                self._work.lost.append(self._work.note(message))
        except DovetailError as error:
            return error
        finally:
            self._reading.release()
        return None

    def _look(self) -> None:
        """Bury an engine that has ended; kill one that has done nothing for too long."""
        channel = self._bury_dead()
        if channel is None:
            return
        why = self._why_kill(channel.progress)
        if why and channel is not self._killed:
            self._killed = channel
            logger.error("The engine is killed: %s.", why)
            _process_of(channel).kill(why)

    def _why_kill(self, progress: Progress) -> str:
        if progress.age_s > self._rules.kill_silence_s:
            return f"it has shown no life for {progress.age_s:.0f} s"
        if progress.step_s > self._rules.kill_step_s:
            return f"a step has not ended within {progress.step_s:.0f} s"
        return ""


def _watch(reference: weakref.ref[Supervisor], closing: threading.Event) -> None:
    """In a thread: look after the engine, as long as anybody has its supervisor."""
    while not closing.wait(_LOOK_S):
        supervisor = reference()
        if supervisor is None:
            return
        supervisor._look()
        del supervisor


def _start_again(
    reference: weakref.ref[Supervisor],
    start: Callable[[], ProcessChannel],
    closing: threading.Event,
    delay_s: float | None,
) -> None:
    """In a thread: start an engine; if it fails, once more, until it is enough."""
    while not closing.wait(delay_s):
        channel, failure = None, None
        try:
            channel = start()
            supervisor = reference()
            if supervisor is None:
                return  # and the engine goes with its channel
            _restore_pause(channel, supervisor.paused)
            supervisor._install(channel)
            return
        except Exception as error:
            failure = error
        if channel is not None:
            channel.close()
        supervisor = reference()
        delay_s = None if supervisor is None else supervisor._fail_to_start(failure)
        if delay_s is None:
            return
        del supervisor, failure


def _restore_pause(channel: ProcessChannel, scope: PauseScope | None) -> None:
    """Pause a new engine before it is given requests. Raises EngineDeadError if it does not."""
    if scope is None:
        return
    channel.send(Call(1, EnginePort.pause, (scope,)))
    reply = channel.receive(_PAUSE_S)
    if not isinstance(reply, Reply):
        raise EngineDeadError("The new engine did not pause as the last one was paused.")
    reply.result()


def _process_of(channel: ProcessChannel) -> EngineProcess:
    link = channel.link
    assert isinstance(link, EngineProcess)
    return link


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

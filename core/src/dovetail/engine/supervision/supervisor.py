"""Owns an engine's processes: monitors them, and starts another engine when one fails.

This module holds the channel to the running engine; all processes of an engine end when it is shut
down or killed. One thread detects the engine's end, even without calls, and kills an engine that
stalls for long; while no engine runs, another thread starts the next one. Both refer to the
supervisor only weakly, so an unused supervisor is collected. The unfinished work of an engine is in
its `Work`.
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
_SLEEP_S = 120.0
"""Limits of the responses to `pause`, and to `sleep` and `wake_up`, which copy weights."""
"""How long a new engine may take to restore the previous engine's pause."""


class Supervisor:
    """Runs successive engines. Thread-safe.

    num_restarts: engines started after the first. paused: the scope of the pause in which the next
    engine starts.
    """

    def __init__(
        self,
        start: Callable[[], ProcessChannel],
        work: Work,
        rules: SupervisionRules,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Start the first engine, in this thread. Raise the error if its startup fails."""
        self.num_restarts = 0
        self.paused: PauseScope | None = None
        self._asleep: tuple[int, tuple[str, ...]] | None = None
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
        """The state of the engine."""
        self._handle_exited()
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
        """The error if no engine runs and none will be started, or None otherwise."""
        return self._final

    def channel(self) -> ProcessChannel:
        """Return the channel to the running engine.

        Raises UnavailableError while none runs, EngineDeadError if none will be started.
        """
        with self._changed:
            if self._final is not None:
                raise self._final.with_traceback(None)
            if self._channel is None:
                raise UnavailableError(
                    "the engine failed and is being restarted; the call was not executed. Retry "
                    "later."
                )
            return self._channel

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until an engine runs. Return whether one runs.

        Raises EngineDeadError if none will be started.
        """
        self._handle_exited()
        with self._changed:
            self._changed.wait_for(lambda: self._runs() or self._final is not None, timeout_s)
            if self._final is not None:
                raise self._final.with_traceback(None)
            return self._runs()

    def _runs(self) -> bool:
        """Return whether an engine runs. Return False if a thread is handling its failure."""
        channel = self._channel
        return channel is not None and not channel.link.has_ended()

    def _wait_for_channel(self, timeout_s: float | None) -> ProcessChannel | None:
        """Wait until an engine runs. Return its channel, or None after the timeout.

        Raises EngineDeadError if none will be started.
        """
        self._handle_exited()
        with self._changed:
            self._changed.wait_for(
                lambda: self._channel is not None or self._final is not None, timeout_s
            )
            if self._final is not None:
                raise self._final.with_traceback(None)
            return self._channel

    def find_channel(self) -> ProcessChannel | None:
        """Return the channel to the running engine, or None if none runs."""
        return self._channel

    def is_current(self, channel: ProcessChannel) -> bool:
        """Return whether this is the channel of the running engine."""
        return channel is self._channel

    def receive(self, timeout_s: float | None) -> Received | None:
        """Return the next message of the current or a failed engine, or None at the timeout.

        Also waits while an engine is being started. Raises EngineDeadError if none will be started.
        """
        begun_ns = self._clock.now_ns()
        while not self._work.lost:
            left_s = timeout_s
            if timeout_s is not None:
                left_s = max(0.0, timeout_s - (self._clock.now_ns() - begun_ns) / 1e9)
            try:
                channel = self._wait_for_channel(left_s)
            except EngineDeadError:
                if self._work.lost:
                    break
                raise
            if self._work.lost:
                break  # an engine failed during the wait; the next one does not know its calls
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
        """Return the next message of an engine, and whether the engine has failed."""
        try:
            with self._reading:
                message = channel.receive(timeout_s)
            return (None if message is None else self._work.note(message)), False
        except EngineDeadError as error:
            self.lose(channel, error)
            return None, True

    def lose(self, channel: ProcessChannel, error: DovetailError) -> None:
        """Handle the failure of an engine: its unfinished work is lost. error: the cause.

        Starts another engine in a thread. Does nothing if this failure was handled before.
        """
        with self._changed:
            if channel is not self._channel:
                return
            self._channel = None
            self.paused, self._asleep = channel.paused, channel.link.heartbeat.asleep
            was_killed = channel is not self._killed and "SIGKILL" in _first_line(error)
            by_request = self._work.blames_request(was_killed=was_killed)
            delay_s = self._restarts.next_delay_s(is_by_request=by_request)
            num_lost = self._work.lose(
                _first_line(error), was_killed=was_killed, restarts_left=self._restarts.num_left
            )
        channel.close()
        logger.error("The engine failed with %d unfinished requests: %s", num_lost, error)
        if not self._closing.is_set():
            self._begin(delay_s, _first_line(error))

    def shutdown(self) -> None:
        """Shut down the engine, even while it is being started. May be called twice.

        Waits at most 30 s for it to exit.
        """
        self._closing.set()
        with self._changed:
            self._final = self._final or EngineDeadError(
                "the engine was shut down; create a new one."
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
        """Make a new engine the current one."""
        with self._changed:
            is_open = not self._closing.is_set()
            if is_open:
                self._channel = channel
                self.num_restarts += 1
                self._changed.notify_all()
        if not is_open:
            channel.close()
            return
        logger.warning("The engine was restarted in process %d.", channel.process_id)

    def _fail_to_start(self, error: Exception) -> float | None:
        """Return the delay of the next attempt, or give up and return None."""
        logger.error("The engine could not be restarted: %s", error)
        delay_s = self._restarts.next_delay_s()
        if delay_s is None:
            self._give_up(_first_line(error))
        return delay_s

    def _disown(self) -> None:
        """Make every later call raise an error. Runs in a forked child, and makes new locks."""
        self._final = forked_error("this engine", self._owner_pid)
        self._channel = None
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._closing = threading.Event()
        self._closing.set()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self._final = self._final or EngineDeadError(
                f"the engine failed {self._restarts.num_failures} times within "
                f"{self._rules.window_s:g} s and is not restarted. The last reason: {reason}"
            )
            self._changed.notify_all()

    def _handle_exited(self) -> ProcessChannel | None:
        """Return the channel of the running engine. Handle an engine that has exited."""
        channel = self._channel
        if channel is None or not channel.link.has_ended():
            return channel
        error = self._find_end(channel)
        if error is not None:
            self.lose(channel, error)
        return None

    def _find_end(self, channel: ProcessChannel) -> DovetailError | None:
        """Return the error of an engine that has exited. Keep its last messages.

        None if another thread is reading: that thread detects the exit.
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
        """Handle an engine that has exited. Kill one that has stalled for too long."""
        channel = self._handle_exited()
        if channel is None:
            return
        why = self._kill_reason(channel.progress)
        if why and channel is not self._killed:
            self._killed = channel
            logger.error("Killing the engine: %s.", why)
            _process_of(channel).kill(why)

    def _kill_reason(self, progress: Progress) -> str:
        if progress.age_s > self._rules.kill_silence_s:
            return f"the engine sent no heartbeat for {progress.age_s:.0f} s"
        if progress.step_s > self._rules.kill_step_s:
            return f"a step has not completed within {progress.step_s:.0f} s"
        return ""


def _watch(reference: weakref.ref[Supervisor], closing: threading.Event) -> None:
    """Monitor the engine while the supervisor is in use. Runs in a thread."""
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
    """Start an engine. Retry after failures, up to the limit. Runs in a thread."""
    while not closing.wait(delay_s):
        channel, failure = None, None
        try:
            channel = start()
            supervisor = reference()
            if supervisor is None:
                return  # closing the channel ends the engine
            _restore_pause(channel, supervisor.paused, supervisor._asleep)
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


def _restore_pause(
    channel: ProcessChannel, scope: PauseScope | None, asleep: tuple[int, tuple[str, ...]] | None
) -> None:
    """Pause a new engine before it gets requests, or put it to sleep, as the previous engine was.

    Raises EngineDeadError if it does not respond.
    """
    calls = []
    if asleep is not None:
        level, awake = asleep
        calls.append(Call(1, EnginePort.sleep, (level,)))
        if awake:
            calls.append(Call(2, EnginePort.wake_up, (awake,)))
    elif scope is not None:
        calls.append(Call(1, EnginePort.pause, (scope,)))
    for call in calls:
        channel.send(call)
        reply = channel.receive(_PAUSE_S if asleep is None else _SLEEP_S)
        if not isinstance(reply, Reply):
            raise EngineDeadError(
                "The previous engine was paused or asleep, but the new engine did not respond to "
                f"{call.operation.name}."
            )
        reply.result()


def _process_of(channel: ProcessChannel) -> EngineProcess:
    link = channel.link
    assert isinstance(link, EngineProcess)
    return link


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

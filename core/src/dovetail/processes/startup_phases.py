"""The phases of an engine's start, with deadlines, durations and memory use.

A start runs its phases in order. An error names the phase in which it was raised, and everything
created so far is undone in reverse order. A thread logs the stack of a phase that takes long, and
interrupts the phase at its deadline. This module does not depend on other parts of the engine.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from types import FrameType, TracebackType

from dovetail.clock import Clock
from dovetail.errors import DovetailError, StartError, describe_failure
from dovetail.faults import fault
from dovetail.machine import read_resident_bytes

logger = logging.getLogger(__name__)

PHASES = (
    "plugins",
    "platform",
    "configuration",
    "select_plugins",
    "executor",
    "init_device",
    "load_model",
    "model_facts",
    "size_cache",
    "warm_up",
    "scheduler",
    "core",
)
"""The phases of a start with an executor of the core, in order. `start.PHASE` is a fault point."""

REPORT_S = 10.0
"""Interval in seconds at which a running phase is logged."""

_STACK_FRAMES = 3
# This signal is ignored by default, so a late one has no effect.
_SIGNAL = signal.SIGURG


@dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """A phase that has ended. before_bytes, after_bytes: resident set size of this process."""

    name: str
    took_s: float
    before_bytes: int
    after_bytes: int

    def __str__(self) -> str:
        """Return the record as text for the log."""
        grown = (self.after_bytes - self.before_bytes) / 2**20
        return f"{self.name} {self.took_s:.2f} s {grown:+.0f} MiB"


class _Overdue(BaseException):
    """Raised in the thread that starts the engine when a phase exceeds its deadline."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """The startup phase that is running now."""

    name: str
    begun_ns: int
    before_bytes: int


class StartUp:
    """One start: `with StartUp(clock, deadline_s=600) as start: start.enter("plugins"); …`.

    If the block raises an error, the functions registered with `undo` are called in reverse order.
    A DovetailError gets its `phase` set; any other Exception becomes a StartError that names the
    phase. A phase can be interrupted at its deadline if startup runs in the main thread and
    SIGURG has no other handler; otherwise, and in native code that does not return, the delay is
    only logged. records: the phases that have ended.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        deadline_s: float,
        report_s: float = REPORT_S,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        """Prepare a start. The `with` statement begins it.

        deadline_s: time limit of each phase. notify: called with the name of each new phase.
        """
        self.records: list[PhaseRecord] = []
        self._clock = clock
        self._deadline_s = deadline_s
        self._report_s = report_s
        self._notify = notify
        self._undo = ExitStack()
        self._running: _Running | None = None
        self._late: _Running | None = None
        self._changed = threading.Condition()
        self._owner = threading.current_thread()
        self._watch = threading.Thread(target=self._run_watch, name="start-watch", daemon=True)
        self._handles = False

    def __enter__(self) -> StartUp:
        """Start the watch thread."""
        self._token = _current.set(self)
        main = self._owner is threading.main_thread()
        if main and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            signal.signal(_SIGNAL, self._interrupt)
            self._handles = True
        self._watch_until_done = True
        self._watch.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the last phase.

        After an error, call the `undo` functions and set the error's phase.
        """
        phase = self._running.name if self._running is not None else ""
        self._end_phase()
        self._stop_watch()
        _current.reset(self._token)
        if error is None:
            self._undo.pop_all()
            return
        try:
            self._undo.close()
        except Exception as undo_error:  # must not replace the first error
            logger.warning(
                "Cleaning up after a failed start raised an error: %s", describe_failure(undo_error)
            )
        # Code that creates a plugin reports every error raised there as the plugin's failure.
        overdue = error if isinstance(error, _Overdue) else error.__cause__
        if isinstance(overdue, _Overdue):
            all_notes = [*getattr(overdue, "__notes__", ()), *getattr(error, "__notes__", ())]
            notes = "".join(f" {note}" for note in dict.fromkeys(all_notes))
            raise self._start_error(
                f"A startup phase has not completed within {self._deadline_s:g} s: "
                f"{overdue}.{notes} Find the cause of the delay, or raise start_timeout_s.",
                phase,
            ) from None
        if isinstance(error, DovetailError):
            error.phase = error.phase or phase
        elif isinstance(error, Exception):
            text = f"The engine could not start: {describe_failure(error)}"
            raise self._start_error(text, phase) from error

    @staticmethod
    def _start_error(text: str, phase: str) -> StartError:
        error = StartError(text)
        error.phase = phase
        return error

    def enter(self, name: str) -> None:
        """End the previous phase, and begin another one."""
        self._end_phase()
        with self._changed:
            self._running = _Running(
                name=name, begun_ns=self._clock.now_ns(), before_bytes=read_resident_bytes()
            )
            self._changed.notify_all()
        if self._notify is not None:
            self._notify(name)
        if name in PHASES:
            fault(f"start.{name}")

    def undo(self, call: Callable[[], object]) -> None:
        """Register a function that is called if startup fails."""
        self._undo.callback(call)

    def _end_phase(self) -> None:
        with self._changed:
            ended, self._running = self._running, None
            self._changed.notify_all()
        if ended is not None:
            self.records.append(
                PhaseRecord(
                    name=ended.name,
                    took_s=(self._clock.now_ns() - ended.begun_ns) / 1e9,
                    before_bytes=ended.before_bytes,
                    after_bytes=read_resident_bytes(),
                )
            )

    def _stop_watch(self) -> None:
        with self._changed:
            self._watch_until_done = False
            self._changed.notify_all()
        self._watch.join()
        if self._handles:
            signal.signal(_SIGNAL, signal.SIG_DFL)

    def _run_watch(self) -> None:
        """Run in the thread: log a phase that takes long, and interrupt it at its deadline."""
        phase: _Running | None = None
        next_s = 0.0
        with self._changed:
            while self._watch_until_done:
                if self._running is not phase:
                    phase, next_s = self._running, min(self._report_s, self._deadline_s)
                if phase is None:
                    self._changed.wait()
                    continue
                taken_s = (self._clock.now_ns() - phase.begun_ns) / 1e9
                if taken_s < next_s:
                    self._changed.wait(next_s - taken_s)
                    continue
                self._report(phase, taken_s)
                next_s = taken_s + self._report_s
                if taken_s < self._deadline_s:
                    next_s = min(next_s, self._deadline_s)

    def _report(self, phase: _Running, taken_s: float) -> None:
        logger.warning(
            "Start-up: the phase %s has taken %.0f s (the limit is %.0f s): %s",
            phase.name,
            taken_s,
            self._deadline_s,
            _stack_of(self._owner),
        )
        if taken_s >= self._deadline_s and self._late is not phase and self._handles:
            self._late = phase
            signal.pthread_kill(self._owner.ident or 0, _SIGNAL)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal: interrupt the phase that is late, if it is still running."""
        if self._late is not None and self._late is self._running:
            raise _Overdue(_stack_text(frame))


_current: ContextVar[StartUp | None] = ContextVar("dovetail_start", default=None)


def enter_phase(name: str) -> None:
    """Enter the next phase of the engine start that runs in this thread, if there is one.

    Executors call this function, because their work takes most of the time of a start.
    """
    start = _current.get()
    if start is not None:
        start.enter(name)


def describe_phases(records: list[PhaseRecord]) -> str:
    """Return the phases on one line, with durations and memory growth."""
    total_s = sum(record.took_s for record in records)
    return f"Started in {total_s:.2f} s: {', '.join(map(str, records))}."


def _stack_of(thread: threading.Thread) -> str:
    return _stack_text(sys._current_frames().get(thread.ident or 0))


def _stack_text(frame: FrameType | None) -> str:
    """Return a thread's stack on one line, the innermost frame last."""
    frames = traceback.extract_stack(frame)[-_STACK_FRAMES:]
    return "in " + " > ".join(f"{item.name} ({item.filename}:{item.lineno})" for item in frames)

"""Children that start together, are watched by one thread, and end together.

The first child that fails or dies is the cause that every caller gets. The others are killed at
once, since they may be waiting for it. `close` leaves no process and no descriptor behind. Does not
depend on what the children do.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Sequence

from dovetail.clock import Clock
from dovetail.errors import DovetailError, EngineDeadError, PeerLostError, describe_failure
from dovetail.faults import fault
from dovetail.processes.child_process import ChildProcess, error_of, wait_readable
from dovetail.processes.start_report import StartReport

logger = logging.getLogger(__name__)

_CAUSE_S = 2.0
"""How long a caller that sees a closed connection waits for the cause."""
_PEER_S = 1.0
"""How soon after a PeerLostError another child must end to be taken as the cause."""
_JOIN_S = 5.0


class ChildGroup:
    """Children by rank. failure: why they cannot continue; None while they can."""

    def __init__(self, phases: Sequence[str], clock: Clock) -> None:
        """phases: of each child's start, in order; the first needs no report."""
        self.children: list[ChildProcess] = []
        self.failure: DovetailError | None = None
        self._phases = phases
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._watch = threading.Thread(target=self._run, name="child-watch", daemon=True)

    def wait_until_ready(self, timeout_s: float, enter: Callable[[str], bool]) -> list[bytes]:
        """Return what each child returned when it was ready, by rank.

        enter: called with each phase when the last child is in it; returns whether the time, of
        `timeout_s` seconds, begins again. Raises the error of the first child that failed, or
        EngineDeadError naming each that is late.
        """
        self._watch.start()
        deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        while self.failure is None and (phase := self._slowest_phase()) < len(self._phases):
            if enter(self._phases[phase]):
                deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
            left_s = (deadline_ns - self._clock.now_ns()) / 1e9
            with self._changed:
                if not self._changed.wait_for(lambda: self._is_beyond(phase), max(0.0, left_s)):
                    self._fail_start(timeout_s)
        if self.failure is not None:
            raise self.failure
        return [child.content or b"" for child in self.children]

    def is_over(self) -> bool:
        """Return whether no child will send another report."""
        return self._closing or self.failure is not None

    def cause(self) -> DovetailError:
        """Return why the children cannot continue; for a caller that sees a closed connection."""
        with self._changed:
            known = self._changed.wait_for(self.is_over, _CAUSE_S)
        if not known:
            self.fail(EngineDeadError("A worker has closed its connection."))
        return self.failure or EngineDeadError("The executor was shut down.")

    def silence_s(self) -> float:
        """Return how many seconds ago the least recent heartbeat was."""
        return max((child.liveness.read().silence_s for child in self.children), default=0.0)

    def fail(self, error: DovetailError) -> None:
        """Make `error` the cause, unless one exists, and kill all children."""
        if self._take_as_cause(error):
            for child in self.children:
                child.kill()

    def close(self, timeout_s: float) -> None:
        """Wait for the children to exit, then kill them. May be called twice.

        The caller has closed their connections, or sent them an order to exit.
        """
        with self._changed:
            self._closing = True
        children, self.children = self.children, []
        for child in children:
            child.dismiss()
        deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        for child in children:
            left_s = max(0.0, (deadline_ns - self._clock.now_ns()) / 1e9)
            if not child.has_ended(left_s) and left_s:
                logger.warning("%s has not ended within %g s and is killed.", child, timeout_s)
        for child in children:
            child.kill()
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join(_JOIN_S)
        for child in children:
            child.close()

    def _take_as_cause(self, error: DovetailError) -> bool:
        """Keep the first cause; return whether the children have to be killed for it."""
        with self._changed:
            if self.failure is None and not self._closing:
                self.failure = error
            self._changed.notify_all()
            return not self._closing

    def _slowest_phase(self) -> int:
        """Return the index of the phase of the child that is behind all others."""
        places = [self._phases.index(one.phase) for one in self.children if one.content is None]
        return min(places, default=len(self._phases))

    def _is_beyond(self, phase: int) -> bool:
        return self.failure is not None or self._slowest_phase() > phase

    def _fail_start(self, timeout_s: float) -> None:
        late = [f"{child} is in {child.phase}" for child in self.children if child.phase]
        self.fail(
            EngineDeadError(
                f"After {timeout_s:g} s, {'; '.join(late)}. Check its output, or raise "
                "start_timeout_s."
            )
        )

    def _run(self) -> None:
        """In the thread: read the reports of all children until all have ended."""
        poll = select.poll()
        children = list(self.children)
        by_control = {child.control.fileno(): child for child in children}
        by_ending = {child.ending: child for child in children}
        for descriptor in {*by_control, *by_ending}:
            poll.register(descriptor, select.POLLIN)
        while by_ending:
            for descriptor, _ in poll.poll():
                if descriptor in by_control and self._read(by_control[descriptor]):
                    continue
                poll.unregister(descriptor)
                if descriptor in by_ending:
                    self._lose(by_ending.pop(descriptor))

    def _read(self, child: ChildProcess) -> bool:
        """Process the next report; return False if no valid report will follow."""
        try:
            fault("multiproc.receive")
            with self._changed:
                report = child.receive()
                if child.phase and child.phase not in self._phases:
                    raise EngineDeadError(f"It reports the unknown phase {child.phase!r:.80}.")
                self._changed.notify_all()
            if report is not None and report.kind == "failed":
                self._blame(child, report)
        except Exception as error:  # after any error this thread continues to watch the children
            what = describe_failure(error)
            self.fail(EngineDeadError(f"{child} sent a report that cannot be read: {what}"))
            return False
        return report is not None

    def _blame(self, child: ChildProcess, report: StartReport) -> None:
        """Take a child's error as the cause; that child exits, the others are killed."""
        child.dismiss()
        error = error_of(report, f"{child}{_during(child)}")
        if isinstance(error, PeerLostError) and (lost := self._ended_beside(child)):
            self._lose(lost)  # `lost` is the cause; `child` only noticed it first
            return
        if self._take_as_cause(error):
            for other in self.children:
                if other is not child:
                    other.kill()

    def _ended_beside(self, child: ChildProcess) -> ChildProcess | None:
        """Return another child that has ended, or does so soon."""
        others = {one.ending: one for one in self.children if one is not child}
        ended = wait_readable(list(others), _PEER_S) if others else []
        return others[ended[0]] if ended else None

    def _lose(self, child: ChildProcess) -> None:
        """Read the last reports of a child that has ended, report its end, and kill the others."""
        while self._read(child):
            pass
        error = f"{child} ended{_during(child)} {child.describe_end()}; its work is lost."
        self.fail(EngineDeadError(error))


def _during(child: ChildProcess) -> str:
    return f" in {child.phase}" if child.phase else ""

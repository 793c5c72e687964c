"""Children that are started together, watched by one thread, and stopped together.

The first child that fails or exits is the cause that every caller gets. The other children are
killed immediately, because they may wait for it. After `close` no process or descriptor remains.
The class does not depend on what the children do.
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
"""Time that a caller waits for the cause of a closed connection."""
_PEER_S = 1.0
"""If another child exits within this time after a PeerLostError, its exit counts as the cause."""
_JOIN_S = 5.0


class ChildGroup:
    """Child processes that start and stop together. children: the children, by rank.

    failure: the first error of a child, or None.
    """

    def __init__(self, phases: Sequence[str], clock: Clock) -> None:
        """Create an empty group.

        phases: the phases of each child's startup, in order. The first one is not reported.
        """
        self.children: list[ChildProcess] = []
        self.failure: DovetailError | None = None
        self._phases = phases
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._watch = threading.Thread(target=self._run, name="child-watch", daemon=True)

    def wait_until_ready(self, timeout_s: float, enter: Callable[[str], bool]) -> list[bytes]:
        """Wait until all children are ready. Return the content of their "ready" reports, by rank.

        enter: called with each phase when the last child has entered it; returns whether the
        timeout of `timeout_s` seconds starts again. Raises the error of the first child that
        failed, or EngineDeadError with the names of the children that are late.
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
        """Return the cause of a closed connection to a child."""
        with self._changed:
            known = self._changed.wait_for(self.is_over, _CAUSE_S)
        if not known:
            self.fail(EngineDeadError("A worker process has closed its connection."))
        return self.failure or EngineDeadError("The executor was shut down.")

    def silence_s(self) -> float:
        """Return the age in seconds of the oldest heartbeat among the children."""
        return max((child.liveness.read().silence_s for child in self.children), default=0.0)

    def fail(self, error: DovetailError) -> None:
        """Record `error` as the cause, unless a cause exists, and kill all children."""
        if self._take_as_cause(error):
            for child in self.children:
                child.kill()

    def close(self, timeout_s: float) -> None:
        """Wait for the children to exit, then kill the remaining ones. May be called twice.

        The caller must first close their connections or request their exit.
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
                logger.warning("%s has not exited within %g s and is killed.", child, timeout_s)
        for child in children:
            child.kill()
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join(_JOIN_S)
        for child in children:
            child.close()

    def _take_as_cause(self, error: DovetailError) -> bool:
        """Record the first cause. Return whether the caller must kill the children."""
        with self._changed:
            if self.failure is None and not self._closing:
                self.failure = error
            self._changed.notify_all()
            return not self._closing

    def _slowest_phase(self) -> int:
        """Return the index of the earliest phase that a child is in."""
        phases = [self._phases.index(item.phase) for item in self.children if item.content is None]
        return min(phases, default=len(self._phases))

    def _is_beyond(self, phase: int) -> bool:
        return self.failure is not None or self._slowest_phase() > phase

    def _fail_start(self, timeout_s: float) -> None:
        late = [f"{child} is in the phase {child.phase}" for child in self.children if child.phase]
        self.fail(
            EngineDeadError(
                f"Startup has not completed within {timeout_s:g} s: {'; '.join(late)}. Check the "
                "output, or raise "
                "start_timeout_s."
            )
        )

    def _run(self) -> None:
        """Run in the thread: read the reports of all children until all have exited."""
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
        """Process the next report. Return False if no valid report will follow."""
        try:
            fault("multiproc.receive")
            with self._changed:
                report = child.receive()
                if child.phase and child.phase not in self._phases:
                    raise EngineDeadError(f"The phase {child.phase!r:.80} is not known.")
                self._changed.notify_all()
            if report is not None and report.kind == "failed":
                self._blame(child, report)
        except Exception as error:  # the thread must continue to watch the children
            what = describe_failure(error)
            self.fail(EngineDeadError(f"{child} sent a report that cannot be read: {what}"))
            return False
        return report is not None

    def _blame(self, child: ChildProcess, report: StartReport) -> None:
        """Record a child's error as the cause. Let this child exit and kill the other children."""
        child.dismiss()
        error = error_of(report, f"{child}{_during(child)}")
        if isinstance(error, PeerLostError) and (lost := self._ended_with(child)):
            self._lose(lost)  # `lost` is the cause; `child` only noticed it first
            return
        if self._take_as_cause(error):
            for other in self.children:
                if other is not child:
                    other.kill()

    def _ended_with(self, child: ChildProcess) -> ChildProcess | None:
        """Wait briefly. Return another child that has exited, or None."""
        others = {item.ending: item for item in self.children if item is not child}
        ended = wait_readable(list(others), _PEER_S) if others else []
        return others[ended[0]] if ended else None

    def _lose(self, child: ChildProcess) -> None:
        """Read the last reports of an exited child, record the cause, and kill the others."""
        while self._read(child):
            pass
        error = f"{child} ended{_during(child)} {child.describe_end()}; its results are lost."
        self.fail(EngineDeadError(error))


def _during(child: ChildProcess) -> str:
    return f" in {child.phase}" if child.phase else ""

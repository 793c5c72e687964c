"""The workers' processes: started together, watched by one thread, and taken down together.

The first that fails or dies is the cause that everybody hears of; the others are ended at once,
since they may be waiting for it, and their closed rings wake whoever waits for an answer. Nothing
of a crew outlives it: no process, descriptor or file. Knows no plan and no operation.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from dovetail.child_process import kill_session, reap, start_child
from dovetail.clock import Clock
from dovetail.errors import DovetailError, EngineDeadError, PeerLostError
from dovetail.executors.multiproc.boot import (
    PHASES,
    Boot,
    Failed,
    Hello,
    Phase,
    PhaseName,
    Serving,
    dismiss,
    hear,
    write_boot,
)
from dovetail.faults import fault
from dovetail.lifeline import hang_up
from dovetail.plugins.containment import describe_failure
from dovetail.plugins.resolution import Resolution
from dovetail.transport.ring import RingPlace, RingReader

logger = logging.getLogger(__name__)

_VERDICT_S = 2.0
_PEER_S = 1.0
"""In which a worker ends that another one has lost, if that is why it was lost."""
_JOIN_S = 5.0


@dataclass(slots=True)
class Member:
    """A worker's process. phase: what it does before it serves; "" once it does.

    ending: a descriptor that can be read when the process has ended.
    """

    rank: int
    process: subprocess.Popen[bytes]
    lifeline: socket.socket
    ending: int
    phase: PhaseName | Literal[""] = "start"
    answers: RingReader | None = None
    resolutions: tuple[Resolution, ...] = ()

    def __str__(self) -> str:
        """Return it as messages name it."""
        return f"worker {self.rank} (process {self.process.pid})"


class Crew:
    """The processes of one executor.

    failure: why they are no more, or None. reading: held by whoever uses a ring, so that none is
    closed under him.
    """

    def __init__(self, folder: str, clock: Clock) -> None:
        """folder: removed at the end; "" for none."""
        self.members: list[Member] = []
        self.failure: DovetailError | None = None
        self.reading = threading.RLock()
        self._folder = folder
        self._clock = clock
        self._changed = threading.Condition()
        self._closing = False
        self._watch = threading.Thread(target=self._run, name="worker-watch", daemon=True)

    def start(self, boot: Boot, lifeline: socket.socket) -> None:
        """Start the next worker; `lifeline` is the executor's end, owned from now on."""
        with ExitStack() as undo:
            undo.callback(lifeline.close)
            lifeline.setblocking(False)
            process = _spawn(boot)
            undo.callback(process.wait)
            undo.callback(process.kill)
            member = Member(boot.rank, process, lifeline, os.pidfd_open(process.pid))
            undo.pop_all()
        self.members.append(member)

    def wait_until_serving(
        self, timeout_s: float, enter: Callable[[str], None]
    ) -> list[RingReader]:
        """Return each rank's ring of answers when all have loaded their model.

        timeout_s: for each phase. enter: told of each phase when the last worker is in it. Raises
        the error of the first that failed, or EngineDeadError naming who is late, and with what.
        """
        fault("multiproc.wait")
        self._watch.start()
        seen: int | None = None
        while self.failure is None and (phase := self._slowest_phase()) < len(PHASES):
            if phase == seen:
                self._fail_start(timeout_s)
                break
            seen = phase
            enter(PHASES[phase])
            with self._changed:
                self._changed.wait_for(lambda: self._is_beyond(phase), timeout_s)
        if self.failure is not None:
            raise self.failure
        return [one.answers for one in self.members if one.answers is not None]

    def is_over(self) -> bool:
        """Return whether nothing more is to be expected of the workers."""
        return self._closing or self.failure is not None

    def verdict(self) -> DovetailError:
        """Return why the workers are no more; called when a ring is seen to be of no use."""
        with self._changed:
            known = self._changed.wait_for(self.is_over, _VERDICT_S)
        if not known:
            self.fail(EngineDeadError("a worker has closed its ring."))
        return self.failure or EngineDeadError("the executor was shut down.")

    def fail(self, error: DovetailError) -> None:
        """Make `error` the cause, unless there is one, and end all processes."""
        if self._take_as_cause(error):
            for member in self.members:
                kill_session(member.process)

    def close(self, timeout_s: float) -> None:
        """Wait for the processes to end by themselves, then end them. May be called twice.

        Whoever calls it has closed the ring of orders: by that they know that they are to end.
        """
        with self._changed:
            self._closing = True
        if self._folder:  # first: nobody meets any more, and who is killed here leaves it
            shutil.rmtree(self._folder, ignore_errors=True)
        for member in self.members:
            dismiss(member.lifeline)
        deadline_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        members, self.members = self.members, []
        for member in members:
            left_s = max(0.0, (deadline_ns - self._clock.now_ns()) / 1e9)
            if not select.select([member.ending], [], [], left_s)[0] and left_s:
                logger.warning("%s has not ended within %g s, and is killed.", member, timeout_s)
        for member in members:
            kill_session(member.process)
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join(_JOIN_S)
        for member in members:
            reap(member.process)
            hang_up(member.lifeline)
            os.close(member.ending)
            if member.answers is not None:
                with self.reading:
                    member.answers.close()

    def _take_as_cause(self, error: DovetailError) -> bool:
        """Keep the first cause; return whether the workers have still to be ended for it."""
        with self._changed:
            if self.failure is None and not self._closing:
                self.failure = error
            self._changed.notify_all()
            return not self._closing

    def _slowest_phase(self) -> int:
        """Return the place among PHASES of the worker that is behind all others."""
        return min(PHASES.index(one.phase) if one.phase else len(PHASES) for one in self.members)

    def _is_beyond(self, phase: int) -> bool:
        return self.failure is not None or self._slowest_phase() > phase

    def _fail_start(self, timeout_s: float) -> None:
        late = [f"{one} is in {one.phase}" for one in self.members if one.phase]
        self.fail(
            EngineDeadError(
                f"after {timeout_s:g} s {'; '.join(late)}. See what it printed, or raise "
                "start_timeout_s."
            )
        )

    def _run(self) -> None:
        """In the thread: hear every process until all have ended."""
        poll = select.poll()
        members = list(self.members)
        told_by = {one.lifeline.fileno(): one for one in members}
        ended = {one.ending: one for one in members}
        for descriptor in (*told_by, *ended):
            poll.register(descriptor, select.POLLIN)
        while ended:
            for descriptor, _ in poll.poll():
                if descriptor in told_by and not self._hear(told_by[descriptor]):
                    poll.unregister(descriptor)
                elif descriptor in ended:
                    poll.unregister(descriptor)
                    self._lose(ended.pop(descriptor))

    def _hear(self, member: Member) -> bool:
        """Take in the next message; return False if no more will come, or can be understood."""
        try:
            fault("multiproc.hear")
            message, descriptors = hear(member.lifeline)
            if isinstance(message, Failed):
                self._blame(member, message)
            elif message is not None:
                self._note(member, message, descriptors)
        except Exception as error:  # whatever it is, this thread goes on: it sees who dies
            what = describe_failure(error)
            self.fail(EngineDeadError(f"{member} cannot be understood: {what}"))
            return False
        return message is not None

    def _note(
        self, member: Member, message: Hello | Phase | Serving, descriptors: tuple[int, ...]
    ) -> None:
        with self._changed:
            if isinstance(message, Hello):
                memory, bell = descriptors
                member.answers = RingPlace(index=0, descriptors=(memory, bell)).take()
            elif isinstance(message, Phase):
                member.phase = message.name
            else:
                member.resolutions = message.loaded()
                member.phase = ""
            self._changed.notify_all()

    def _blame(self, member: Member, message: Failed) -> None:
        """Take the error of a worker as the cause; it ends by itself, the others are ended."""
        dismiss(member.lifeline)
        during = f" in {member.phase}" if member.phase else ""
        error = message.error.error(f"{member}{during}")
        if isinstance(error, PeerLostError) and (lost := self._ended_beside(member)):
            self._lose(lost)  # whose end is the cause; this one only heard of it first
            return
        if self._take_as_cause(error):
            for other in self.members:
                if other is not member:
                    kill_session(other.process)

    def _ended_beside(self, member: Member) -> Member | None:
        """Return another worker that has ended, or does so soon."""
        others = {one.ending: one for one in self.members if one is not member}
        ended = select.select(list(others), [], [], _PEER_S)[0] if others else []
        return others[ended[0]] if ended else None

    def _lose(self, member: Member) -> None:
        """A process has ended: hear its last words, say how it ended, and end the others."""
        while self._hear(member):
            pass
        found = os.waitid(os.P_PID, member.process.pid, os.WEXITED | os.WNOWAIT)
        exited = found is not None and found.si_code == os.CLD_EXITED
        status = 0 if found is None else found.si_status
        how = f"with status {status}" if exited else f"by {signal.Signals(status).name}"
        during = f" in {member.phase}" if member.phase else ""
        self.fail(EngineDeadError(f"{member} ended{during} {how}; what it was doing is lost."))


def _spawn(boot: Boot) -> subprocess.Popen[bytes]:
    boot_file = write_boot(boot)
    try:
        fault("multiproc.spawn")
        return start_child(
            "dovetail.executors.multiproc",
            str(boot_file),
            str(os.getpid()),
            descriptors=(boot_file, *boot.descriptors),
        )
    finally:
        os.close(boot_file)

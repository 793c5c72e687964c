"""Signs of life of an engine's process, which its parent reads without asking for them.

They lie in shared memory, so that they can be read of a process that does not answer, or has died.
A thread writes the time for the process itself and, as long as the executor hears of all its
workers, for them: a long step is no silence, and a process that is stopped is. The engine's loop
writes when a step begins, so that one that never ends is seen, too; its start, in which phase it
is. Both sides read the same monotonic clock.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.clock import Clock
from dovetail.executors.multiproc.pulse import BEAT_S
from dovetail.transport.ring_memory import anonymous_file

_PROCESS, _WORKERS, _STEP = range(3)
_PHASE = slice(64, 128)
_NUM_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Seconds since the process and its quietest worker showed life, and since a step began.

    0.0 for what has not begun.
    """

    process_s: float
    workers_s: float
    step_s: float


def make_vitals() -> int:
    """Return the descriptor of memory for the signs of one process; the caller closes it."""
    return anonymous_file(_NUM_BYTES)


class VitalsReader:
    """The parent's side. May be used by several threads, and closed twice."""

    def __init__(self, descriptor: int, clock: Clock) -> None:
        """Map the memory; the descriptor stays the caller's."""
        self._mapping = _map(descriptor)
        self._clock = clock
        self._lock = threading.Lock()
        self._last = bytes(_NUM_BYTES)

    def ages(self) -> Ages:
        """Return how old the signs are; as of its end for what was closed."""
        times_ns, now_ns = memoryview(self._read()[:64]).cast("Q"), self._clock.now_ns()
        ages = [max(0, now_ns - time_ns) / 1e9 if time_ns else 0.0 for time_ns in times_ns]
        return Ages(process_s=ages[_PROCESS], workers_s=ages[_WORKERS], step_s=ages[_STEP])

    def phase(self) -> str:
        """Return the phase of its start that the process is, or was, in; "" for none."""
        return self._read()[_PHASE].rstrip(b"\0").decode("utf-8", "replace")

    def close(self) -> None:
        """Give the memory back; the phase can still be asked for."""
        self._read()
        with self._lock:
            self._mapping.close()

    def _read(self) -> bytes:
        with self._lock:
            if not self._mapping.closed:
                self._last = self._mapping[:]
            return self._last


class VitalSigns:
    """The process's side: a thread that writes, until `stop`."""

    def __init__(self, descriptor: int, clock: Clock) -> None:
        """Map the memory and begin; the descriptor stays the caller's."""
        self._mapping = _map(descriptor)
        self._times_ns = memoryview(self._mapping)[:64].cast("Q")
        self._clock = clock
        self._silence_s: Callable[[], float] = _no_silence
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vital-signs", daemon=True)
        self._thread.start()

    def enter_phase(self, name: str) -> None:
        """Write that a phase of the start begins; "" when the start is over."""
        length = _PHASE.stop - _PHASE.start
        self._mapping[_PHASE] = name.encode()[:length].ljust(length, b"\0")

    def watch(self, silence_s: Callable[[], float]) -> None:
        """Tell of the workers from now on. silence_s: how long the quietest has been silent."""
        self._silence_s = silence_s

    def begin_step(self) -> None:
        """Write that a step begins."""
        self._times_ns[_STEP] = self._clock.now_ns()

    def end_step(self) -> None:
        """Write that none is under way."""
        self._times_ns[_STEP] = 0

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            now_ns = self._clock.now_ns()
            self._times_ns[_PROCESS] = now_ns
            self._times_ns[_WORKERS] = now_ns - int(self._silence_s() * 1e9)
            if self._stopped.wait(BEAT_S):
                return


def _map(descriptor: int) -> mmap.mmap:
    return mmap.mmap(descriptor, os.fstat(descriptor).st_size)


def _no_silence() -> float:
    return 0.0

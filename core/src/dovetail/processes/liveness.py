"""Heartbeats of a child process in shared memory, which its parent reads.

They can be read even if the process does not respond or has exited. A thread of the child writes
the time, so a long step does not look like a stall; a process that is stopped, or whose threads
cannot run, stops reporting. A child with child processes also writes the age of their oldest
heartbeat, when its current step began, and how many steps it has executed. Parent and child read
the same monotonic clock.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.clock import Clock
from dovetail.transport.ring_memory import anonymous_file

INTERVAL_S = 0.25
"""Interval in seconds at which a child writes the time."""
_PROCESS, _CHILDREN, _STEP, _NUM_STEPS = range(4)
_NUM_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """The heartbeats of one process.

    process_s: seconds since it last wrote the time. children_s: seconds since the oldest of its
    children's heartbeats. step_s: seconds since its current step began. All are 0.0 before the
    first heartbeat. num_steps: executed steps.
    """

    process_s: float
    children_s: float
    step_s: float
    num_steps: int

    @property
    def silence_s(self) -> float:
        """Seconds since the last heartbeat of the process, or of a child if that is older."""
        return max(self.process_s, self.children_s)


class LivenessReader:
    """The parent's view of the heartbeats. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        """Create shared memory for heartbeats. The caller closes `descriptor`."""
        self.descriptor = anonymous_file(_NUM_BYTES)
        self._words = _map(self.descriptor)
        self._clock = clock

    def read(self) -> Liveness:
        """Return the heartbeats. After `close`, those at the time of `close`."""
        words, now_ns = self._words, self._clock.now_ns()
        process_s, children_s, step_s = (
            max(0, now_ns - time_ns) / 1e9 if time_ns else 0.0 for time_ns in words[: _STEP + 1]
        )
        return Liveness(
            process_s=process_s,
            children_s=children_s,
            step_s=step_s,
            num_steps=words[_NUM_STEPS],
        )

    def close(self) -> None:
        """Keep a copy of the heartbeats and unmap the memory. May be called twice."""
        self._words = memoryview(bytes(self._words)).cast("Q")


class LivenessWriter:
    """The child's side: a thread that writes the time until `stop` is called."""

    def __init__(self, descriptor: int, clock: Clock) -> None:
        """Map the memory, close its descriptor, and start the thread."""
        self._words = _map(descriptor)
        os.close(descriptor)
        self._clock = clock
        self._silence_s: Callable[[], float] = float
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def watch_children(self, silence_s: Callable[[], float]) -> None:
        """Also write the age of the children's last heartbeat, which `silence_s` returns."""
        self._silence_s = silence_s

    def begin_step(self) -> None:
        """Record that a step begins."""
        self._words[_STEP] = self._clock.now_ns()

    def end_step(self) -> None:
        """Record that the step has ended, and count it."""
        self._words[_STEP] = 0
        self._words[_NUM_STEPS] += 1

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            now_ns = self._clock.now_ns()
            self._words[_PROCESS] = now_ns
            self._words[_CHILDREN] = now_ns - int(self._silence_s() * 1e9)
            if self._stopped.wait(INTERVAL_S):
                return


def _map(descriptor: int) -> memoryview[int]:
    return memoryview(mmap.mmap(descriptor, _NUM_BYTES)).cast("Q")

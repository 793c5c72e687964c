"""Signs of life: each worker's process writes the time, and the executor reads how long ago.

Written by a thread of its own, so that a long step is not taken for a stall; a process that is
stopped, or does not let its threads run, falls silent. Both sides read the same monotonic clock.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence

from dovetail.clock import Clock
from dovetail.transport.ring_memory import anonymous_file

BEAT_S = 0.25
_LINE_WORDS = 8  # a cache line each


def make_board(world_size: int) -> int:
    """Return the descriptor of memory for so many pulses; the caller closes it."""
    return anonymous_file(8 * _LINE_WORDS * world_size)


class PulseBoard:
    """The pulses of all workers. May be used by several threads, and closed twice."""

    def __init__(self, descriptor: int) -> None:
        """Map the memory; the descriptor stays the caller's."""
        self._mapping = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = memoryview(self._mapping).cast("Q")
        self._lock = threading.Lock()
        self._closed = False

    def beat(self, rank: int, now_ns: int) -> None:
        """Write that `rank` lives."""
        self._words[rank * _LINE_WORDS] = now_ns

    def silences_s(self, ranks: Sequence[int], now_ns: int) -> list[float]:
        """Return for how many seconds each of `ranks` has been silent.

        0.0 before its first, and once the board is closed.
        """
        with self._lock:
            beats = [0 if self._closed else self._words[rank * _LINE_WORDS] for rank in ranks]
        return [max(0, now_ns - beat) / 1e9 if beat else 0.0 for beat in beats]

    def close(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._closed = True
            self._words.release()
            self._mapping.close()


class Pulse:
    """The thread that beats, for one rank, until `stop`."""

    def __init__(self, board: PulseBoard, rank: int, clock: Clock) -> None:
        self._stopped = threading.Event()
        self._board, self._rank, self._clock = board, rank, clock
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._board.beat(self._rank, self._clock.now_ns())
            if self._stopped.wait(BEAT_S):
                return

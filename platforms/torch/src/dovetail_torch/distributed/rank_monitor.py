"""Monitors the processes of the other ranks, and aborts collective operations if one exits.

On an asynchronous device, a collective operation with a process that has exited never ends, and the
host would wait for the device until the timeout of the process group. The monitor needs ranks on
one machine and a kernel with `pidfd_open` (Linux 5.3). Other ranks are not monitored: the timeouts
of the executor and of the process group end a collective operation with them.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.errors import PeerLostError

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

_KEY = "process of rank {}"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = "/proc/self/ns/pid"


class RankMonitor:
    """Calls `abort` once, in a thread, when a monitored process exits."""

    def __init__(self, pids: Mapping[int, int], abort: Callable[[], None]) -> None:
        """pids: process ids by rank, without this process. abort: must not raise."""
        self._abort = abort
        self._lost: int | None = None
        self._is_closed = False
        self._ranks: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        for rank, pid in pids.items():
            try:
                self._ranks[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                self._lost = rank
            except OSError as error:
                logger.warning(
                    "The process %d of rank %d cannot be monitored: %s", pid, rank, error
                )
        self._thread = threading.Thread(target=self._run, name="rank-monitor", daemon=True)
        self._thread.start()

    @property
    def num_monitored(self) -> int:
        """The number of processes that are monitored."""
        return len(self._ranks)

    @property
    def has_lost(self) -> bool:
        """Whether a monitored process has exited."""
        return self._lost is not None

    def check(self) -> None:
        """Raise PeerLostError if a monitored process has exited."""
        if self._lost is not None:
            raise PeerLostError(
                f"rank {self._lost} has exited, so the collective operation was aborted; see the "
                "log of its worker."
            )

    def close(self) -> None:
        """Stop monitoring. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with suppress(BrokenPipeError):  # the thread has just exited, and closed its socket
            os.write(self._wake_write, b"x")
        self._thread.join()
        os.close(self._wake_write)

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (*self._ranks, self._wake_read):
            poll.register(descriptor, select.POLLIN)
        try:
            if self._lost is None:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._wake_read in ready:
                    return
                self._lost = self._ranks[ready[0]]
            logger.error("Rank %d has exited; collective operations are aborted.", self._lost)
            self._abort()
        finally:
            for descriptor in (*self._ranks, self._wake_read):
                os.close(descriptor)


def monitor_ranks(store: Store, *, rank: int, size: int, abort: Callable[[], None]) -> RankMonitor:
    """Exchange process ids through `store` and return the monitor. Called on all ranks."""
    store.set(_KEY.format(rank), _own_identity())
    own_machine, _, own_pid = _own_identity().rpartition(" ")
    pids = {}
    for other in range(size):
        machine, _, pid = store.get(_KEY.format(other)).decode().rpartition(" ")
        if machine == own_machine and pid != own_pid:
            pids[other] = int(pid)
    return RankMonitor(pids if hasattr(os, "pidfd_open") else {}, abort)


def _own_identity() -> str:
    """Return the id of the machine, the PID namespace, and the process id."""
    try:
        machine = f"{_BOOT_ID.read_text('utf-8').strip()} {os.readlink(_NAMESPACE)}"
    except OSError:
        machine = f"unknown-{os.getpid()}"  # equal to no other machine
    return f"{machine} {os.getpid()}"

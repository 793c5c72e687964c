"""The CPU as a torch device: threads, and memory measured as the resident set."""

from __future__ import annotations

import logging
import mmap
import os
import resource
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dovetail.processes.affinity import unbind_thread
from dovetail_cpu.memory_nodes import spread_pages
from dovetail_cpu.native_library import find_library
from dovetail_cpu.pairwise_ranks import PairwiseRanks
from dovetail_cpu.platform import CPUPlatform
from dovetail_cpu.rank_memory import share_memory
from dovetail_cpu.rank_sockets import connect_ranks
from dovetail_cpu.threads.choice import ThreadChoice, default_threads
from dovetail_cpu.threads.sharing import join_team, leave_team
from dovetail_cpu.threads.supply import start_team, start_threads

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

_PROFILE_TOKENS = 64
"""Number of tokens of the step that measures memory. Memory is proportional to the number of
tokens, and a larger step would delay the startup."""
_MAX_TEAM = 64
"""Maximum number of threads of the native kernels' team."""
_HUGE_PAGE_BYTES = 2 << 20
SMALL_PAGES_BYTES = 256 << 10
"""The number of bytes at the start of `lazy_zeros` that are not in huge pages."""


class CPURuntime:
    """Implements `dovetail_torch.device_runtime.DeviceRuntime`.

    num_sharing: number of the engine's processes on this machine; each gets a part of its cores and
    memory.
    """

    def __init__(self) -> None:
        self._base_bytes = 0
        self.num_threads = self._team_size = default_threads(1).number
        self.num_sharing = 1

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Set the threads of torch and the native kernels to `num_threads`.

        None: this process's part of the physical cores that it may use (`default_threads`).
        Raises CapacityError if the system cannot start this number of threads. Warns if another
        engine of this process has set another number, because the threads are shared.
        """
        chosen = default_threads(self.num_sharing)
        if num_threads:
            chosen = ThreadChoice(number=num_threads, reason="requested")
        self.num_threads = chosen.number
        logger.info("Computing on %d threads (%s).", chosen.number, chosen.reason)
        start_threads(self.num_threads)
        library = find_library()
        if library is not None:
            unbind_thread()
            self._team_size = start_team(library, min(self.num_threads, _MAX_TEAM))
        join_team(self, self.num_threads)
        return torch.device("cpu")

    def release(self) -> None:
        """Record that this engine computes no more. May be called twice."""
        leave_team(self)

    def leave_cores_to_team(self) -> None:
        """Restrict torch to one thread: two teams of spinning threads would double the time."""
        torch.set_num_threads(1)
        logger.info("Native kernels compute on %d threads, torch on one.", self._team_size)
        if self._team_size < self.num_threads:
            reason = f"a team has at most {_MAX_TEAM} threads"
            if self._team_size < _MAX_TEAM:
                reason = "the system permits no more (ulimit -u, pids.max of the cgroup)"
            logger.warning(
                "The native kernels use %d of %d threads, because %s.",
                self._team_size,
                self.num_threads,
                reason,
            )

    def total_memory_bytes(self) -> int:
        """Return this process's part of the memory of the machine or of its cgroup."""
        return CPUPlatform().total_memory_bytes() // self.num_sharing

    def memory_in_use_bytes(self) -> int:
        """Return this process's resident memory."""
        return _status_bytes("VmRSS")

    def address_space_left_bytes(self) -> int:
        """Return how many more bytes this process may map (ulimit -v).

        Without a limit, return a very large number.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return 1 << 62
        return max(0, limit - _status_bytes("VmSize"))

    def reset_peak(self) -> None:
        """Reset the system's peak-memory counter, and store the current use as the baseline.

        If the system does not allow a reset, the baseline is the peak since the process started.
        """
        clear_refs = Path("/proc/self/clear_refs")
        if os.access(clear_refs, os.W_OK):
            clear_refs.write_text("5")
        self._base_bytes = _status_bytes("VmRSS" if os.access(clear_refs, os.W_OK) else "VmHWM")

    def peak_bytes(self) -> int:
        """Return the largest growth of resident memory since `reset_peak`."""
        return max(0, _status_bytes("VmHWM") - self._base_bytes)

    def max_profile_tokens(self) -> int:
        """Return a small number of tokens, so that the measured step is fast."""
        return _PROFILE_TOKENS

    def synchronize(self) -> None:
        """Do nothing: every call is synchronous."""

    def asynchronous(self) -> None:
        """Return None: the host computes."""
        return None

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> PairwiseRanks:
        """Return the group of ranks, which communicate over unix sockets and shared memory.

        Raises RuntimeError if other ranks do not connect.
        """
        ends = connect_ranks(store, rank=rank, size=size, timeout=timeout)
        try:
            memory = share_memory(ends, rank)
        except OSError as error:
            for end in ends.values():
                end.close()
            raise RuntimeError(f"the ranks cannot share memory: {error}") from error
        for end in ends.values():
            end.setblocking(False)
        return PairwiseRanks(ends, memory, rank=rank, timeout=timeout)


def lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory, uint8. Unused pages are not allocated.

    It starts SMALL_PAGES_BYTES before a huge page, so that the first use of a buffer, such as the
    first short prompt in a layer's cache, does not wait until a huge page is cleared.
    """
    # A separate mapping, because the allocator would write zeros to every page. It is private,
    # because shared mappings, the default of `mmap`, have no huge pages.
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, num_bytes + 2 * _HUGE_PAGE_BYTES, flags=kind)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    spread_pages(whole.data_ptr(), len(whole))
    border = _HUGE_PAGE_BYTES + -whole.data_ptr() % _HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_NOHUGEPAGE, 0, border)
        mapped.madvise(mmap.MADV_HUGEPAGE, border)
    start = border - SMALL_PAGES_BYTES
    return whole[start : start + num_bytes]


def _status_bytes(field: str) -> int:
    """Return a size of this process in bytes.

    Without /proc (macOS), return its peak resident memory.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    for line in status.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0

"""The CPU as a torch device: threads, and memory as the process's resident set."""

from __future__ import annotations

import logging
import mmap
import os
import resource
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dovetail_cpu.native_library import find_library
from dovetail_cpu.pairwise_ranks import PairwiseRanks
from dovetail_cpu.rank_memory import share_memory
from dovetail_cpu.rank_sockets import connect_ranks
from dovetail_cpu.thread_supply import start_threads

if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

_PROFILE_TOKENS = 64
"""Activations grow in proportion to tokens; running more would only make the start slower."""
_MAX_TEAM = 64
"""Threads that a team of native kernels can have."""
_HUGE_PAGE_BYTES = 2 << 20


class CPURuntime:
    """Implements `dovetail_torch.device_runtime.DeviceRuntime`.

    num_sharing: processes of the engine on this machine; each has its part of cores and memory.
    """

    def __init__(self) -> None:
        self._base_bytes = 0
        self.num_threads = len(os.sched_getaffinity(0))
        self.num_sharing = 1

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Set torch's and the native kernels' threads to `num_threads`.

        None: to the cores that this process may use, divided by the processes that share them.
        Raises CapacityError where the system does not give so many.
        """
        num_cores = len(os.sched_getaffinity(0))
        self.num_threads = num_threads or max(1, num_cores // self.num_sharing)
        start_threads(self.num_threads)
        library = find_library()
        if library is not None:
            library.dk_set_num_threads(min(self.num_threads, _MAX_TEAM))
        return torch.device("cpu")

    def leave_cores_to_team(self) -> None:
        """Let torch compute on one thread from now on: two teams that spin cost twice the time."""
        torch.set_num_threads(1)
        logger.info("Native kernels on %d threads, torch on 1.", self.num_threads)

    def total_memory_bytes(self) -> int:
        """Return this process's part of the machine's memory, or of what its group may have."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text().strip() if limit.exists() else "max"
        allowed = min(total, int(text)) if text.isdigit() else total
        return allowed // self.num_sharing

    def memory_in_use_bytes(self) -> int:
        """Return this process's resident memory."""
        return _status_bytes("VmRSS")

    def address_space_left_bytes(self) -> int:
        """Return what this process may still map (ulimit -v); a great number without a limit."""
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            return 1 << 62
        return max(0, limit - _status_bytes("VmSize"))

    def reset_peak(self) -> None:
        """Let the kernel forget the peak so far, and remember where the next one begins.

        Where the kernel does not allow that, the peak of the whole life so far is the base.
        """
        clear_refs = Path("/proc/self/clear_refs")
        if os.access(clear_refs, os.W_OK):
            clear_refs.write_text("5")
        self._base_bytes = _status_bytes("VmRSS" if os.access(clear_refs, os.W_OK) else "VmHWM")

    def peak_bytes(self) -> int:
        """Return how far resident memory has risen since `reset_peak`."""
        return max(0, _status_bytes("VmHWM") - self._base_bytes)

    def max_profile_tokens(self) -> int:
        """Return a number of tokens that is quick to run."""
        return _PROFILE_TOKENS

    def synchronize(self) -> None:
        """Do nothing: every call has returned when it is done."""

    def asynchronous(self) -> None:
        """Return None: the host does the computing."""
        return None

    def join(self, store: Store, *, rank: int, size: int, timeout: timedelta) -> PairwiseRanks:
        """Return the group of ranks, who exchange tensors over unix sockets and shared memory.

        Raises RuntimeError where others do not come.
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
    """Return zeroed memory, uint8, on a huge page's boundary; untouched pages are not taken."""
    # A mapping of its own: the allocator's zeros would be written, page by page. Not a shared one,
    # as `mmap` makes by itself: those have no huge pages.
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=kind)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE_BYTES
    return whole[start : start + num_bytes]


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0

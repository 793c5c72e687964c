"""The CPU as a torch device: threads, and memory as the process's resident set."""

from __future__ import annotations

import logging
import mmap
import os
from pathlib import Path

import torch

from dovetail_cpu.native_library import find_library

logger = logging.getLogger(__name__)

_PROFILE_TOKENS = 64
"""Activations grow in proportion to tokens; running more would only make the start slower."""
_MAX_TEAM = 64
"""Threads that a team of native kernels can have."""
_HUGE_PAGE_BYTES = 2 << 20


class CPURuntime:
    """Implements `dovetail_torch.device_runtime.DeviceRuntime`."""

    def __init__(self) -> None:
        self._base_bytes = 0
        self.num_threads = len(os.sched_getaffinity(0))

    def activate(self, local_rank: int, *, num_threads: int | None) -> torch.device:
        """Set torch's and the native kernels' threads to `num_threads`.

        None: to the cores that this process may use.
        """
        self.num_threads = num_threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(self.num_threads)
        library = find_library()
        if library is not None:
            library.dk_set_num_threads(min(self.num_threads, _MAX_TEAM))
        return torch.device("cpu")

    def leave_cores_to_team(self) -> None:
        """Let torch compute on one thread from now on: two teams that spin cost twice the time."""
        torch.set_num_threads(1)
        logger.info("Native kernels on %d threads, torch on 1.", self.num_threads)

    def total_memory_bytes(self) -> int:
        """Return the machine's memory, or what the process's control group allows of it."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = Path("/sys/fs/cgroup/memory.max")
        text = limit.read_text().strip() if limit.exists() else "max"
        return min(total, int(text)) if text.isdigit() else total

    def memory_in_use_bytes(self) -> int:
        """Return this process's resident memory."""
        return _status_bytes("VmRSS")

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


def lazy_zeros(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory, uint8, on a huge page's boundary; untouched pages are not taken."""
    # A mapping of its own: the allocator's zeros would be written, page by page.
    mapped = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES)
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

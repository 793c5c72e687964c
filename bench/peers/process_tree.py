"""Reads the CPU time and memory of a process tree and of other processes from /proc on Linux.

Without /proc all results are zero: nothing is marked as disturbed and no memory is reported.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """CPU time since boot in ticks: for all processes, for measured processes, and steal time."""

    busy: int
    own: int
    stolen: int

    @classmethod
    def now(cls, root: int, idle: Collection[int] = ()) -> CpuTime:
        """Read the CPU time of the tree below process `root`, including finished children.

        idle: processes in that tree that should be idle, with their children; their CPU time counts
        as CPU time of other processes.
        """
        own = ticks_of(root) - sum(ticks_of(pid) for pid in idle)
        # user, nice, system, idle, iowait, irq, softirq, steal
        first = _read(PROC / "stat").partition("\n")[0].split()[1:9] or ["0"] * 8
        user, nice, system, _, _, irq, softirq, stolen = map(int, first)
        return cls(busy=user + nice + system + irq + softirq, own=own, stolen=stolen)

    def lost_since(self, begin: CpuTime) -> float:
        """Return the CPU seconds that other processes and the hypervisor used since `begin`."""
        others = (self.busy - begin.busy) - (self.own - begin.own)
        return (max(0, others) + self.stolen - begin.stolen) / TICKS_PER_S


def ticks_of(root: int) -> int:
    """Return the CPU time of the tree below `root`, in ticks."""
    return sum(_cpu_ticks(pid) for pid in tree_of(root))


def tree_of(root: int) -> list[int]:
    """Return the process `root` and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*"):
        fields = _stat_fields(int(entry.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    collected, todo = [], [root]
    while todo:
        pid = todo.pop()
        collected.append(pid)
        todo += children.get(pid, [])
    return collected


def peak_rss_mib(root: int) -> float:
    """Return the sum of the peak resident memory of all processes of the tree, in MiB.

    Shared pages count for each process; of a mapped file only the accessed pages count.
    """
    total = 0
    for pid in tree_of(root):
        for line in _read(PROC / str(pid) / "status").splitlines():
            if line.startswith("VmHWM"):
                total += int(line.split()[1])
    return total / 1024


def _cpu_ticks(pid: int) -> int:
    # utime, stime, and both times of children that were waited for
    return sum(map(int, _stat_fields(pid)[11:15]))


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat, starting at "state"; [] if the process has exited."""
    return _read(PROC / str(pid) / "stat").rpartition(")")[2].split()


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace")
    except OSError:
        return ""

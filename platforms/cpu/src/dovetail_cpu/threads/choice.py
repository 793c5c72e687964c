"""How many threads compute by default.

This module does not import torch, because `dovetail.processes.affinity` reads the affinity mask
before torch is imported.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from dovetail.machine import read_cgroup_limits
from dovetail.processes.affinity import allowed_cpus, has_affinity

_CPU_FOLDER = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, kw_only=True)
class ThreadChoice:
    """number: number of compute threads. reason: explanation of this number for the log."""

    number: int
    reason: str


def default_threads(num_sharing: int) -> ThreadChoice:
    """Return the number of threads for each of `num_sharing` processes that share the cores.

    The available cores are the smallest of three numbers: CPUs of the affinity mask, physical cores
    among these CPUs, and the rounded CPU quota of the cgroup. The available cores are divided among
    the processes; each gets at least one thread.
    """
    cpus = allowed_cpus()
    cores = _num_physical(cpus)
    quota = read_cgroup_limits().cpu_quota
    number = min(len(cpus), cores)
    reason = f"{len(cpus)} CPUs in the affinity mask, {cores} physical cores"
    if not has_affinity():
        reason = f"{len(cpus)} CPUs; the system has no affinity mask"
    if quota is not None:
        number = min(number, math.floor(quota + 0.5))
        reason += f", CPU quota of the cgroup {quota:.2f}"
    if num_sharing > 1:
        reason += f", shared by {num_sharing} processes"
    return ThreadChoice(number=max(1, number // num_sharing), reason=reason)


def _num_physical(cpus: Set[int]) -> int:
    """Return the physical cores of `cpus`. CPUs that report no siblings count as one each."""
    core_ids = set()
    for cpu in cpus:
        try:
            siblings = (_CPU_FOLDER / f"cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        core_ids.add(siblings.strip())
    return len(core_ids)

"""The CPUs that this process may use, and how many threads compute by default.

This module does not import torch: OpenMP binds the main thread to one CPU when torch is imported if
OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY is set, so the affinity mask is read before.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from dovetail.machine import read_cgroup_limits

BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Environment variables with which OpenMP binds threads to CPUs."""
_CPU_FOLDER = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, kw_only=True)
class ThreadChoice:
    """number: number of compute threads. reason: explanation of this number for the log."""

    number: int
    reason: str


def has_affinity() -> bool:
    """Return whether this system reports and sets the CPUs of a thread (not macOS, Windows)."""
    return hasattr(os, "sched_getaffinity")


def allowed_cpus() -> Set[int]:
    """Return the CPUs of the process's affinity mask, unaffected by OpenMP's binding."""
    if not has_affinity():
        return frozenset(range(os.cpu_count() or 1))
    if _is_bound() and _before_torch:
        return _before_torch
    return os.sched_getaffinity(0)


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


def unbind_thread() -> None:
    """Undo OpenMP's binding of the calling thread, so that it may use all CPUs of the process.

    Threads that it starts inherit its CPUs.
    """
    if has_affinity() and os.sched_getaffinity(0) != allowed_cpus():
        os.sched_setaffinity(0, allowed_cpus())


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


def _is_bound() -> bool:
    return "torch" in sys.modules and any(os.environ.get(name) for name in BINDING_VARIABLES)


def _read_mask() -> Set[int]:
    """Return the affinity mask.

    If OpenMP has bound this thread, return the CPUs of OpenMP's places.
    """
    if not has_affinity():
        return frozenset()
    mask = os.sched_getaffinity(0)
    cpus = _openmp_cpus() if _is_bound() else frozenset[int]()
    if not cpus:
        return mask
    os.sched_setaffinity(0, cpus)  # the system ignores CPUs that do not exist or are not allowed
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, mask)
    return allowed


def _openmp_cpus() -> Set[int]:
    """Return the CPUs over which the OpenMP runtime of this process distributes threads."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    cpus: set[int] = set()
    for path in paths:
        openmp = ctypes.CDLL(path)
        for index in range(openmp.omp_get_num_places()):
            ids = (ctypes.c_int * openmp.omp_get_place_num_procs(index))()
            openmp.omp_get_place_proc_ids(index, ids)
            cpus.update(ids)
    return cpus


_before_torch = _read_mask()

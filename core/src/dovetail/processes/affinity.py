"""The CPUs that this process may use, even if OpenMP has bound its thread to one of them.

OpenMP binds the main thread to one CPU when torch is imported if OMP_PROC_BIND, OMP_PLACES or
GOMP_CPU_AFFINITY is set, and threads and processes inherit this. So the affinity mask is read when
this module is imported, usually before torch. If torch was imported earlier, OpenMP reports the
CPUs over which it distributes threads.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path

BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
"""Environment variables with which OpenMP binds threads to CPUs."""


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


def unbind_thread() -> None:
    """Undo OpenMP's binding of the calling thread, so that it may use all CPUs of the process.

    Threads that it starts inherit its CPUs.
    """
    if has_affinity() and os.sched_getaffinity(0) != allowed_cpus():
        os.sched_setaffinity(0, allowed_cpus())


@contextmanager
def unbound_thread() -> Iterator[None]:
    """Undo OpenMP's binding of the calling thread in a `with` block, in which it starts a process.

    The process inherits the thread's CPUs. If the system rejects this, nothing changes.
    """
    before = os.sched_getaffinity(0) if has_affinity() else frozenset[int]()
    with suppress(OSError):
        unbind_thread()
    try:
        yield
    finally:
        if before and os.sched_getaffinity(0) != before:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


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

"""Start the threads of torch and of the native kernels early, so that a failure can be reported.

OpenMP aborts the process if it cannot start a thread. So the memory for stacks and the number of
threads are checked first, and the threads are started before the model uses memory.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import threading

import torch

from dovetail.errors import CapacityError

_MIN_PER_THREAD = 1 << 15
"""Number of elements per torch thread."""
_USUAL_STACK_BYTES = 8 << 20
_MARGIN_BYTES = 4 << 20
_GIB = 1 << 30


def start_threads(num_threads: int) -> None:
    """Start `num_threads` torch threads.

    Raises CapacityError if their stacks do not fit, or if the system does not permit as many.
    """
    torch.set_num_threads(num_threads)
    if num_threads > 1:
        _check_room(num_threads)
        _check_number(num_threads)
        torch.empty(num_threads * _MIN_PER_THREAD, dtype=torch.uint8).fill_(0)


def _check_room(num_threads: int) -> None:
    stack_bytes, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if stack_bytes == resource.RLIM_INFINITY:
        stack_bytes = _USUAL_STACK_BYTES
    room = (num_threads - 1) * (stack_bytes + mmap.PAGESIZE) + _MARGIN_BYTES
    try:
        mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
    except OSError as error:
        raise CapacityError(
            f"num_threads={num_threads} needs {room / _GIB:.2f} GiB of address space for stacks, "
            f"which is not available ({error}): lower num_threads, or raise the limit (ulimit -v)."
        ) from error


def start_team(library: ctypes.CDLL, num_threads: int) -> int:
    """Start the threads of the native kernels. Return how many there are, with the caller.

    The number is lower than `num_threads` if the system does not permit as many.
    """
    # Imported here because it needs the native kernels.
    from dovetail_cpu_kernels.probe import PIECE_BYTES, read_bandwidth

    library.dk_set_num_threads(num_threads)
    if num_threads > 1:
        # The first operation with two pieces starts the threads.
        memory = (ctypes.c_uint8 * (2 * PIECE_BYTES))()
        read_bandwidth(ctypes.addressof(memory), 2 * PIECE_BYTES)
    return int(library.dk_num_threads())


def _check_number(num_threads: int) -> None:
    """Raise CapacityError if this process cannot start as many threads."""
    stop, started = threading.Event(), list[threading.Thread]()
    try:
        while len(started) < num_threads - 1:
            thread = threading.Thread(target=stop.wait, name="dovetail-thread-check", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise CapacityError(
            f"num_threads={num_threads}: the system permits only {1 + len(started)} ({error}): "
            "lower num_threads, or raise the limit on threads (ulimit -u, pids.max of the cgroup)."
        ) from error
    finally:
        stop.set()
        for thread in started:
            thread.join()

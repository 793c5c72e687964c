"""Start torch's threads early, so that a lack of memory can be reported.

OpenMP aborts the process if it cannot allocate a thread's stack. So the memory for stacks is
checked first, and the threads are started before the model uses memory.
"""

from __future__ import annotations

import mmap
import resource

import torch

from dovetail.errors import CapacityError

_MIN_PER_THREAD = 1 << 15
"""Number of elements per torch thread."""
_USUAL_STACK_BYTES = 8 << 20
_MARGIN_BYTES = 4 << 20
_GIB = 1 << 30


def start_threads(num_threads: int) -> None:
    """Start `num_threads` torch threads. Raise CapacityError if their stacks do not fit."""
    torch.set_num_threads(num_threads)
    if num_threads > 1:
        _check_room(num_threads)
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

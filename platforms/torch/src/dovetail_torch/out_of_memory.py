"""Convert out-of-memory errors of torch, Python or the system to CapacityError.

For the message, the caller states the purpose of the memory and the remedy.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dovetail.errors import CapacityError

_GIB = 1 << 30
_TORCH_SAYS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "not enough memory",
    "error: out of memory",
)
"""Messages of torch's out-of-memory errors for host memory, also pinned, with type RuntimeError."""


@contextmanager
def explain_oom(purpose: str, remedy: str) -> Iterator[None]:
    """Raise CapacityError with `purpose` and `remedy` if the block runs out of memory.

    Can be used as a decorator. All other errors pass unchanged, including CapacityError.
    """
    try:
        yield
    except CapacityError:
        raise
    except Exception as error:
        cause = _oom_message(error)
        if cause is None:
            raise
        raise CapacityError(
            f"There is not enough memory for {purpose} ({_first_line(cause)}).{_limit()} "
            f"Free memory, or {remedy}."
        ) from error


def _oom_message(error: BaseException) -> BaseException | None:
    """Return the out-of-memory error: `error` or one of its causes, or None if there is none."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return error
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return error
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _TORCH_SAYS):
        return error
    return None if error.__cause__ is None else _oom_message(error.__cause__)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _limit() -> str:
    """Return a sentence about the limit on this process's address space, or ""."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f" The process is limited to {limit / _GIB:.2f} GiB of address space (ulimit -v)."

"""Objects that belong to the process that created them. A forked child never uses or closes them.

A fork copies every object, finalizer and exit hook, but no thread. So code that ends a child
process, removes a directory or writes to shared memory must run in the owner only.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from dovetail.errors import EngineDeadError

_after_fork: list[weakref.WeakMethod[Callable[[], None]]] = []
_is_registered = False


def finalize_in_owner(
    subject: object, call: Callable[..., object], *args: Any
) -> weakref.finalize[..., Any]:
    """Return a `weakref.finalize` that calls `call(*args)` in this process only.

    It runs when `subject` is collected, when the interpreter exits, or when it is called. In a
    forked child it does nothing. `call` and `args` must not refer to `subject`.
    """
    return weakref.finalize(subject, _run_in_owner, os.getpid(), call, *args)


def on_fork_in_child(method: Callable[[], None]) -> None:
    """Register a bound method to be called first in every forked child, while its object exists.

    The method must not take a lock, because another thread of the parent may have held the lock.
    """
    global _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(after_in_child=_run_after_fork)
    _after_fork[:] = [known for known in _after_fork if known() is not None]
    _after_fork.append(weakref.WeakMethod(method))


def forked_error(what: str, owner_pid: int) -> EngineDeadError:
    """Return the error for the use of `what` in a forked child of its owner."""
    return EngineDeadError(
        f"{what} belongs to process {owner_pid} and cannot be used in its forked child "
        f"{os.getpid()}. Create another engine in this process, or start it with the method "
        "'spawn'."
    )


def _run_in_owner(owner_pid: int, call: Callable[..., object], *args: Any) -> None:
    if os.getpid() == owner_pid:
        call(*args)


def _run_after_fork() -> None:
    for reference in _after_fork:
        method = reference()
        if method is not None:
            method()

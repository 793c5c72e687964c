"""A lock that lets one thread at a time use an object. This module does not depend on an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

P = ParamSpec("P")
R = TypeVar("R")


class ThreadGuard:
    """A reentrant lock that can be used after a fork.

    In a forked child it is unlocked, because the thread that held it does not exist in the child.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            self._lock = threading.RLock()
            self._process = os.getpid()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()


class Guarded(Protocol):
    """An object with guarded methods. guard: the lock that each of them takes."""

    guard: ThreadGuard


S = TypeVar("S", bound=Guarded)


def one_thread_at_a_time(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Decorate a method: one thread at a time runs the decorated methods of an object."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.guard:
            return method(self, *args, **kwargs)

    return guarded

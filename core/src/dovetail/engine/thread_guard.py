"""One thread at a time inside an engine: the others wait for their turn. Depends on no engine."""

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
    """A lock that the thread that holds it may take again.

    A forked child does not wait for it: the thread that held it does not exist there.
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
    """What has a guard. guard: taken by each of its guarded methods."""

    guard: ThreadGuard


S = TypeVar("S", bound=Guarded)


def one_thread_at_a_time(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Let a method run in one thread at a time, among all guarded methods of its object."""

    @wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.guard:
            return method(self, *args, **kwargs)

    return guarded

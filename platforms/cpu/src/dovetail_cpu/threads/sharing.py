"""The engines of this process share one team of threads: the last number of threads applies to all.

An engine that computes in another process (`engine_process`) has its own team.
"""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Set

logger = logging.getLogger(__name__)

_numbers: dict[weakref.ref[object], int] = {}
"""Numbers of threads by engine. There is no lock, because a finalizer of any object may shut an
engine down, and so call `leave_team`, while this thread is in this module."""

# A forked child has none of its parent's threads.
os.register_at_fork(after_in_child=lambda: _numbers.clear())


def join_team(user: object, num_threads: int) -> None:
    """Record that `user` has set the number of threads. Warn if it differs from another user's."""
    _numbers[weakref.ref(user, lambda reference: _numbers.pop(reference, None))] = num_threads
    if _others(num_threads):
        # A deleted engine has reference cycles, so it may not be freed yet.
        gc.collect()
    if others := _others(num_threads):
        logger.warning(
            "num_threads=%d of this engine replaces num_threads=%s of another engine in this "
            "process, because they share their threads. Use the same num_threads, or "
            "engine_process=True.",
            num_threads,
            ", ".join(map(str, sorted(others))),
        )


def leave_team(user: object) -> None:
    """Record that `user` computes no more. May be called twice."""
    _numbers.pop(weakref.ref(user), None)


def _others(num_threads: int) -> Set[int]:
    """Return the other numbers of threads that are in use."""
    return set(_numbers.copy().values()) - {num_threads}

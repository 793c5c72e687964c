"""The engines of this process share one team of threads: the last number of threads applies to all.

An engine that computes in another process (`engine_process`) has its own team.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

logger = logging.getLogger(__name__)

_numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()


def join_team(user: object, num_threads: int) -> None:
    """Record that `user` has set the number of threads. Warn if it differs from another user's."""
    others = {number for other, number in _numbers.items() if other is not user}
    _numbers[user] = num_threads
    if others - {num_threads}:
        before = ", ".join(str(number) for number in sorted(others - {num_threads}))
        logger.warning(
            "num_threads=%d of this engine replaces num_threads=%s of another engine in this "
            "process, because they share their threads. Use the same num_threads, or "
            "engine_process=True.",
            num_threads,
            before,
        )


def leave_team(user: object) -> None:
    """Record that `user` computes no more. May be called twice."""
    _numbers.pop(user, None)

"""A scheduler as its policy sees it: the read-only side, and nothing that could be written to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from dovetail.interfaces.policy import RequestView
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.request import Request
from dovetail.scheduling.waiting_queue import WaitingQueue


class View:
    """Implements `dovetail.interfaces.policy.SchedulerView`; one for a scheduler's life."""

    def __init__(
        self, *, now_ns: Callable[[], int], running: Sequence[Request], kv_cache: KVCacheManager
    ) -> None:
        self._now_ns = now_ns
        self._running = running
        self._kv_cache = kv_cache
        self._waiting: WaitingQueue | None = None

    def watch(self, waiting: WaitingQueue) -> None:
        """Count those in `waiting`: the queue is made after the view that ranks its requests."""
        self._waiting = waiting

    @property
    def now_ns(self) -> int:
        """The engine's time, in nanoseconds."""
        return self._now_ns()

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in the order of their admission."""
        return tuple(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a row."""
        return len(self._waiting) if self._waiting is not None else 0

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be handed out now."""
        return self._kv_cache.num_free_blocks

    def num_cached_tokens(self, request: RequestView) -> int:
        """Return how many of the request's tokens the prefix cache holds; changes nothing."""
        blocks = self._kv_cache.lookup(cast("Request", request))
        return len(blocks) * self._kv_cache.block_size

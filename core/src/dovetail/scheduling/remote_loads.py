"""Requests whose keys and values come from elsewhere, and what the KV connector is told.

An admitted request whose load takes has blocks, but no row: the seats are for those that can run.
When its load has ended it is next in line for one, before anybody is admitted. Without a connector
there is nothing here, and look-ups are the KV cache's own. Depends on no policy and no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from dovetail.interfaces.scheduler import SchedulerContext
from dovetail.kv_cache.hit import Hit
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.kv_cache.remote import RemoteCache
from dovetail.request import Request


class RemoteLoads:
    """Those that hold blocks and no row: their loads are under way, or have ended well."""

    def __init__(self, context: SchedulerContext, kv_cache: KVCacheManager) -> None:
        """As many requests as there are seats may wait for loads at a time; others compute."""
        self._kv_cache = kv_cache
        self._remote: RemoteCache | None = None
        if context.kv_connector is not None:
            self._remote = RemoteCache(
                context.kv_connector,
                kv_cache,
                clock=context.clock,
                timeout_s=context.kv_transfer_timeout_s,
            )
        self._max_loads = context.limits.max_num_seqs
        self._under_way: dict[Request, int] = {}
        self._arrived: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._under_way) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._under_way, self._arrived)

    def __contains__(self, request: Request) -> bool:
        return request in self._under_way or request in self._arrived

    @property
    def num_transfers(self) -> int:
        """Loads and stores that have not ended; plans must go out until then."""
        return 0 if self._remote is None else self._remote.num_transfers

    def lookup(self, request: Request) -> Hit:
        """Return the longest prefix that is cached here or can be loaded; changes nothing."""
        if self._remote is None or len(self) >= self._max_loads:
            return self._kv_cache.lookup(request)
        return self._remote.lookup(request)

    def begin(self, request: Request, hit: Hit) -> bool:
        """Load what is missing from `hit`, with which `request` has just got its blocks.

        Returns whether it has to wait for that; it is one of those held here then.
        """
        waits = self._remote is not None and self._remote.load(request, hit)
        if waits:
            self._under_way[request] = hit.num_tokens
        return waits

    def add(self, answer: bytes) -> list[tuple[Request, bool]]:
        """Take in what a worker answered; return whose loads have ended, and whether well."""
        return [] if self._remote is None else self._remote.update(answer)

    def give_up_late(self) -> list[tuple[Request, bool]]:
        """Give up loads that have not ended in time; return whose they are, as `add` does."""
        if self._remote is None or not self._remote.num_transfers:
            return []
        return self._remote.give_up_late()

    def arrive(self, request: Request) -> None:
        """Let a request whose load has ended well wait for a seat."""
        self._arrived[request] = self._under_way.pop(request)

    def take_arrived(self) -> tuple[Request, int] | None:
        """Return, and hold no longer, who waits longest for a seat, and its computed tokens."""
        if not self._arrived:
            return None
        request = next(iter(self._arrived))
        return request, self._arrived.pop(request)

    def discard(self, request: Request) -> bool:
        """Hold `request` no longer; return whether it was held. Its blocks are the caller's."""
        held = request in self
        self._under_way.pop(request, None)
        self._arrived.pop(request, None)
        return held

    def offer(self, request: Request) -> None:
        """Offer for storing what `request` has committed since it did so last."""
        if self._remote is not None:
            self._remote.offer(request)

    def release(self, request: Request, *, finished: bool) -> None:
        """Note that `request` is about to give up its blocks; finished: and will not come back."""
        if self._remote is not None:
            self._remote.release(request, finished=finished)

    def take_instructions(self) -> bytes:
        """Return what travels with the plan that is about to go out."""
        return b"" if self._remote is None else self._remote.take_instructions()

    def shutdown(self) -> None:
        """Let go of the connector. May be called twice."""
        if self._remote is not None:
            self._remote.shutdown()

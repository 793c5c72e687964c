"""Requests whose keys and values are loaded by a KV connector, and the connector's notifications.

An admitted request whose load is asynchronous has blocks, but no row: rows are for requests that
can run. After its load it gets the next free row, before any admission. Without a connector this
module does nothing, and look-ups only use the KV cache. Depends on no policy and no row.
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
    """Requests with blocks and no row: their loads are in progress or have succeeded."""

    def __init__(self, context: SchedulerContext, kv_cache: KVCacheManager) -> None:
        """At most as many requests as there are rows may wait for loads; the others compute."""
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
        """Loads and stores that have not ended; plans must be sent until then."""
        return 0 if self._remote is None else self._remote.num_transfers

    def lookup(self, request: Request) -> Hit:
        """Return the longest prefix that is cached or can be loaded; changes nothing."""
        if self._remote is None or len(self) >= self._max_loads:
            return self._kv_cache.lookup(request)
        return self._remote.lookup(request)

    def begin(self, request: Request, hit: Hit) -> bool:
        """Load the blocks of `request` that `hit` lacks. The request has just got its blocks.

        Returns whether the request has to wait for the load; it is then one of those held here.
        """
        waits = self._remote is not None and self._remote.load(request, hit)
        if waits:
            self._under_way[request] = hit.num_tokens
        return waits

    def add(self, answer: bytes) -> list[tuple[Request, bool]]:
        """Process a worker's report; return the requests whose loads ended, and their success."""
        return [] if self._remote is None else self._remote.update(answer)

    def cancel_late_loads(self) -> list[tuple[Request, bool]]:
        """Cancel loads that exceed their timeout; return the requests as `add` does."""
        if self._remote is None or not self._remote.num_transfers:
            return []
        return self._remote.cancel_late_loads()

    def arrive(self, request: Request) -> None:
        """Let a request whose load has succeeded wait for a row."""
        self._arrived[request] = self._under_way.pop(request)

    def take_loaded(self) -> tuple[Request, int] | None:
        """Remove and return the request that waits longest for a row, with its computed tokens."""
        if not self._arrived:
            return None
        request = next(iter(self._arrived))
        return request, self._arrived.pop(request)

    def discard(self, request: Request) -> bool:
        """Stop holding `request`; return whether it was held. The caller frees its blocks."""
        held = request in self
        self._under_way.pop(request, None)
        self._arrived.pop(request, None)
        return held

    def offer(self, request: Request) -> None:
        """Offer the blocks that `request` has committed since its last offer for storing."""
        if self._remote is not None:
            self._remote.offer(request)

    def release(self, request: Request, *, finished: bool) -> None:
        """Record that `request` is about to give up its blocks; finished: whether it has ended."""
        if self._remote is not None:
            self._remote.release(request, finished=finished)

    def take_instructions(self) -> bytes:
        """Return the connector's instructions for the next plan."""
        return b"" if self._remote is None else self._remote.take_instructions()

    def shutdown(self) -> None:
        """Shut the connector down. May be called twice."""
        if self._remote is not None:
            self._remote.shutdown()

"""Tracks requests whose keys and values a KV connector loads, and notifies the connector.

An admitted request whose load is asynchronous has blocks, but no batch slot: batch slots are for
requests that can run. After its load it gets the next free batch slot, before any admission.
Without a connector this module does nothing, and look-ups only use the KV cache. It does not use
policies or batch slots.
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
    """Requests with blocks but no batch slot, whose loads are in progress or have succeeded."""

    def __init__(self, context: SchedulerContext, kv_cache: KVCacheManager) -> None:
        """Create the object without requests.

        At most `max_num_seqs` requests may wait for loads. Further requests load nothing and
        compute their tokens.
        """
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
        self._in_progress: dict[Request, int] = {}
        self._arrived: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._in_progress) + len(self._arrived)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._in_progress, self._arrived)

    def __contains__(self, request: Request) -> bool:
        return request in self._in_progress or request in self._arrived

    @property
    def num_transfers(self) -> int:
        """Number of unfinished loads and stores. Plans must be sent until it is 0."""
        return 0 if self._remote is None else self._remote.num_transfers

    def lookup(self, request: Request) -> Hit:
        """Return the longest prefix that is cached or can be loaded. Changes nothing."""
        if self._remote is None or len(self) >= self._max_loads:
            return self._kv_cache.lookup(request)
        return self._remote.lookup(request)

    def begin(self, request: Request, hit: Hit) -> bool:
        """Load the blocks of `request` that `hit` lacks. Its blocks have just been allocated.

        Returns whether the request must wait for the load; it is then held by this object.
        """
        waits = self._remote is not None and self._remote.load(request, hit)
        if waits:
            self._in_progress[request] = hit.num_tokens
        return waits

    def add(self, report: bytes) -> list[tuple[Request, bool]]:
        """Process a worker's report. Return (request, whether its load succeeded) for each load."""
        return [] if self._remote is None else self._remote.update(report)

    def cancel_late_loads(self) -> list[tuple[Request, bool]]:
        """Cancel loads that exceed their timeout. Return them in the form that `add` returns."""
        if self._remote is None or not self._remote.num_transfers:
            return []
        return self._remote.cancel_late_loads()

    def arrive(self, request: Request) -> None:
        """Let a request whose load has succeeded wait for a batch slot."""
        self._arrived[request] = self._in_progress.pop(request)

    def take_loaded(self) -> tuple[Request, int] | None:
        """Remove and return (request, number of computed tokens) of the longest-waiting request."""
        if not self._arrived:
            return None
        request = next(iter(self._arrived))
        return request, self._arrived.pop(request)

    def discard(self, request: Request) -> bool:
        """Stop holding `request`. Return whether it was held. The caller frees its blocks."""
        held = request in self
        self._in_progress.pop(request, None)
        self._arrived.pop(request, None)
        return held

    def offer(self, request: Request) -> None:
        """Offer the connector the blocks that `request` has committed since the last offer."""
        if self._remote is not None:
            self._remote.offer(request)

    def release(self, request: Request, *, finished: bool) -> None:
        """Record that `request` will free its blocks. finished: whether it has ended."""
        if self._remote is not None:
            self._remote.release(request, finished=finished)

    def take_instructions(self) -> bytes:
        """Return the connector's instructions for the next plan."""
        return b"" if self._remote is None else self._remote.take_instructions()

    def shutdown(self) -> None:
        """Shut the connector down. May be called twice."""
        if self._remote is not None:
            self._remote.shutdown()

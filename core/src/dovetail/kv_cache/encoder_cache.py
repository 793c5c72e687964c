"""The encoder cache manager tracks the encoder outputs in a worker and the requests that use them.

The capacity is a number of embeddings, one per placeholder token. The key of an output is the hash
of its content, so requests with the same image share it. Unused outputs are evicted in LRU order
when room is needed. This module uses no tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from dovetail.request import EncoderInput, Request


class EncoderCacheManager:
    """Tracks encoder outputs in use, and unused ones that are kept while there is room.

    capacity: number of embeddings. num_queries, num_hits, num_evictions: how many outputs were
    looked up, found and evicted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_queries = 0
        self.num_hits = 0
        self.num_evictions = 0
        self._sizes: dict[
            bytes, int
        ] = {}  # number of embeddings of each output, by the hash of its content
        self._references: Counter[bytes] = Counter()
        self._held: dict[str, dict[int, bytes]] = {}
        self._unused: OrderedDict[bytes, None] = OrderedDict()
        self._num_used = 0
        self._num_kept = 0
        self._evicted: list[bytes] = []

    @property
    def num_used(self) -> int:
        """Number of embeddings of the outputs in use."""
        return self._num_used

    @property
    def num_cached(self) -> int:
        """Number of embeddings of all cached outputs, used or not."""
        return self._num_used + self._num_kept

    def has(self, item: EncoderInput) -> bool:
        """Return whether the output is cached or a plan in flight computes it."""
        return item.content_hash in self._sizes

    def can_allocate(self, items: Iterable[EncoderInput]) -> bool:
        """Return whether `allocate` succeeds for all `items` together. Changes nothing."""
        more = {
            item.content_hash: self._sizes.get(item.content_hash, item.num_tokens)
            for item in items
            if item.content_hash not in self._references
        }
        return self._num_used + sum(more.values()) <= self.capacity

    def allocate(self, request: Request, index: int) -> bool:
        """Add a reference to the output of `request.encoder_inputs[index]`, for the next plan.

        Returns whether that plan must compute it. `take_evicted` returns the outputs that were
        evicted for it. Does nothing if the request already uses the output. Raises LookupError,
        changing nothing, if there is no room.
        """
        held = self._held.get(request.request_id, {})
        if index in held:
            return False
        item = request.encoder_inputs[index]
        content = item.content_hash
        if not self.can_allocate((item,)):
            raise LookupError(
                f"{item.num_tokens} embeddings are needed, but only "
                f"{self.capacity - self._num_used} are free"
            )
        self.num_queries += 1
        self._held.setdefault(request.request_id, held)[index] = content
        if content in self._references:
            self._references[content] += 1
            self.num_hits += 1
            return False
        self._references[content] = 1
        size = self._sizes.setdefault(content, item.num_tokens)
        self._num_used += size
        if content in self._unused:
            del self._unused[content]
            self._num_kept -= size
            self.num_hits += 1
            return False
        self._make_room()
        return True

    def free_input(self, request: Request, index: int) -> None:
        """Remove a reference, because the placeholders' keys and values are in the KV cache.

        Does nothing if the request does not use the output.
        """
        held = self._held.get(request.request_id)
        if held is None or index not in held:
            return
        content = held.pop(index)
        if not held:
            del self._held[request.request_id]
        self._references[content] -= 1
        if not self._references[content]:
            del self._references[content]
            self._unused[content] = None
            self._num_used -= self._sizes[content]
            self._num_kept += self._sizes[content]

    def free(self, request: Request) -> None:
        """Remove all references of a request that has ended or is preempted."""
        for index in list(self._held.get(request.request_id, ())):
            self.free_input(request, index)

    def take_evicted(self) -> list[bytes]:
        """Return the hashes of outputs that were evicted since the last call, for the next plan.

        The same plan may compute an evicted output again, because a worker applies evictions first.
        """
        evicted, self._evicted = self._evicted, []
        return evicted

    def reset(self) -> bool:
        """Drop all outputs. If any is in use, change nothing and return False."""
        if self._references:
            return False
        self._evicted += self._unused
        self._unused.clear()
        self._sizes.clear()
        self._num_kept = 0
        return True

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Raise AssertionError if a count is wrong or requests not in `requests` use outputs."""
        names = {request.request_id for request in requests}
        assert names >= set(self._held), (
            "a request that has ended still has a reference to an output"
        )
        counted = Counter(content for held in self._held.values() for content in held.values())
        assert counted == self._references, (
            "the reference counts differ from the references of the requests"
        )
        assert not counted.keys() & self._unused.keys(), (
            "an output with references is listed as unused"
        )
        assert counted.keys() | self._unused.keys() == self._sizes.keys(), (
            "an output is neither in use nor listed as unused"
        )
        assert self._num_used == sum(self._sizes[content] for content in counted)
        assert self._num_kept == sum(self._sizes[content] for content in self._unused)
        assert self.num_cached <= self.capacity, "the cached outputs exceed the capacity"

    def _make_room(self) -> None:
        while self.num_cached > self.capacity:
            content, _none = self._unused.popitem(last=False)
            self._num_kept -= self._sizes.pop(content)
            self.num_evictions += 1
            self._evicted.append(content)

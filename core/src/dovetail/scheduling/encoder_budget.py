"""The encoder inputs of a step and their limits.

A step may compute placeholder tokens only if the encoder output of their content is cached, or is
computed in the same step. The cached and the computed outputs are limited, in placeholder tokens.
Planning records the needs; the encoder cache is changed only when the step is emitted, so revoking
a grant is one deletion. This module does not use policies, batch slots or KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dovetail.errors import RequestError
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.kv_cache.encoder_cache import EncoderCacheManager
from dovetail.plan import StepBuilder
from dovetail.request import EncoderInput, EngineCoreRequest, Request

Need = tuple[Request, int]
"""A request, and the index of one of its encoder inputs."""


class EncoderBudget:
    """Decides which encoder inputs each step encodes, so that no limit is exceeded."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._wanted: dict[Request, tuple[list[int], int]] = {}
        self._max_tokens = limits.max_num_encoder_tokens
        self._cache = EncoderCacheManager(limits.encoder_cache_tokens)
        self._chunks = limits.enable_chunked_prefill

    def check(self, request: EngineCoreRequest) -> None:
        """Raise RequestError if the encoder inputs of `request` do not fit into any step."""
        sizes = [item.num_tokens for item in request.encoder_inputs]
        maximum = min(self._max_tokens, self._cache.capacity)
        needed = max(sizes) if self._chunks else sum(sizes)
        if needed > maximum:
            raise RequestError(
                f"the request's encoder inputs need {needed} encoder tokens in one step, but only "
                f"{maximum} fit; send less, or raise max_num_encoder_tokens and "
                "encoder_cache_tokens.",
                parameter="prompt",
            )

    def reach(self, request: Request, start: int, end: int) -> int:
        """Return how far this step can compute the tokens [start, end) of `request`.

        Changes nothing. The step must stop before the first placeholder whose encoder output cannot
        be available.
        """
        items = [_item(need) for need in self._needs()]
        for index in _overlapping(request, start, end):
            item = request.encoder_inputs[index]
            items.append(item)
            if not self._fits(items):
                return max(start, item.position)
        return end

    def want(self, request: Request, start: int, end: int) -> None:
        """Record that this step computes the tokens [start, end), which `reach` allows."""
        indices = list(_overlapping(request, start, end))
        if indices:
            self._wanted[request] = (indices, end)

    def revoke(self, request: Request) -> None:
        """Remove the grant that was recorded for `request` in this step."""
        self._wanted.pop(request, None)

    def emit(self, builder: StepBuilder) -> None:
        """Add the missing encoder inputs to the plan. Free the outputs evicted for them."""
        if not self._wanted:
            return
        cache = self._cache
        # Cached outputs are acquired first, so that no other request evicts them.
        needs = sorted(self._needs(), key=lambda need: not cache.has(_item(need)))
        for request, index in needs:
            if cache.allocate(request, index):
                builder.encode(request.row, index)
        for need in needs:
            item = _item(need)
            if item.position + item.num_tokens <= self._wanted[need[0]][1]:
                cache.free_input(*need)  # no later run reads it; later plans may evict it
        for content_hash in cache.take_evicted():
            builder.free_encoded(content_hash)
        self._wanted.clear()

    def free(self, request: Request) -> None:
        """Release all encoder outputs of `request`, which loses its batch slot."""
        self._cache.free(request)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise AssertionError if requests other than `running` use encoder outputs."""
        self._cache.check_integrity(running)

    def _needs(self) -> Iterator[Need]:
        return ((item, index) for item, (indices, _) in self._wanted.items() for index in indices)

    def _fits(self, items: list[EncoderInput]) -> bool:
        new = {item.content_hash: item.num_tokens for item in items if not self._cache.has(item)}
        return sum(new.values()) <= self._max_tokens and self._cache.can_allocate(items)


def _item(need: Need) -> EncoderInput:
    request, index = need
    return request.encoder_inputs[index]


def _overlapping(request: Request, start: int, end: int) -> Iterator[int]:
    """Yield the indices of the encoder inputs with placeholders in [start, end), by position."""
    for index, item in enumerate(request.encoder_inputs):
        if item.position < end and item.position + item.num_tokens > start:
            yield index

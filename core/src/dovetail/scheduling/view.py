"""The read-only view of a scheduler that its policy gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import cast, overload

from dovetail.interfaces.policy import RequestView
from dovetail.request import Request
from dovetail.scheduling.scheduler_state import SchedulerState
from dovetail.scheduling.waiting_queue import WaitingQueue


class WaitingView(Sequence[RequestView]):
    """The requests that could be admitted now: a view of the queue, sorted only as far as read."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return self._queue.num_ready

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._queue)

    @overload
    def __getitem__(self, place: int) -> RequestView: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[RequestView]: ...

    def __getitem__(self, place: int | slice) -> RequestView | Sequence[RequestView]:
        if isinstance(place, int) and place >= 0:
            for request in islice(self._queue, place, None):
                return request
            raise IndexError(f"index {place} is out of range: {len(self)} requests wait")
        return tuple(self._queue)[place]


class View:
    """Implements `dovetail.interfaces.policy.SchedulerView`. A scheduler has one view."""

    def __init__(self, state: SchedulerState, queue: Callable[[], WaitingQueue], seed: int) -> None:
        """queue: returns the waiting queue, which changes when a policy has failed."""
        self._state = state
        self._queue = queue
        self._rng = Random(f"policy {seed}")

    @property
    def now_ns(self) -> int:
        """The time of this step, in nanoseconds of the engine's clock."""
        return self._state.now_ns

    @property
    def step_id(self) -> int:
        """The number of the step that is being planned."""
        return self._state.builder.step_id

    @property
    def rng(self) -> Random:
        """Random numbers for the policy only."""
        return self._rng

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a row, in the order of their admission."""
        return tuple(self._state.running)

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests without a row that could be admitted now, in the order of `rank`."""
        return WaitingView(self._queue())

    @property
    def num_waiting(self) -> int:
        """Requests without a row, whether ready or not."""
        state = self._state
        return len(self._queue()) + len(state.held_requests) + len(state.loads)

    @property
    def tokens_left(self) -> int:
        """Tokens of this step's budget that are not granted yet."""
        return self._state.draft.tokens_left

    @property
    def seats_left(self) -> int:
        """Rows that could be granted now."""
        return self._state.rows.num_free

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that could be granted now."""
        return self._state.kv_cache.num_free_blocks

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._state.kv_cache.block_size

    def num_cached_tokens(self, request: RequestView) -> int:
        """Return how many of its tokens the prefix cache holds; changes nothing."""
        return self._state.num_cached_tokens(cast("Request", request))

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Return the number of known or pending tokens that are still to be computed."""
        return cast("Request", request).num_uncomputed_tokens

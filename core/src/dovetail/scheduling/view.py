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
    """The requests that may be admitted now, in the policy's order. Sorted only as far as read."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return self._queue.num_ready

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._queue)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...

    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        if isinstance(index, int) and index >= 0:
            for request in islice(self._queue, index, None):
                return request
            raise IndexError(f"index {index} is out of range: {len(self)} requests are waiting")
        return tuple(self._queue)[index]


class View:
    """Implements `dovetail.interfaces.policy.SchedulerView`. A scheduler has one view."""

    def __init__(self, state: SchedulerState, queue: Callable[[], WaitingQueue], seed: int) -> None:
        """queue: returns the waiting queue, which is replaced when a policy fails."""
        self._state = state
        self._queue = queue
        self._rng = Random(f"policy {seed}")

    @property
    def now_ns(self) -> int:
        """The time of this step, in nanoseconds of the engine's clock."""
        return self._state.now_ns

    @property
    def step_id(self) -> int:
        """The id of the step that is being planned."""
        return self._state.builder.step_id

    @property
    def rng(self) -> Random:
        """A random number generator for this policy, seeded by the engine."""
        return self._rng

    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold a batch slot, in the order of their admission."""
        return tuple(self._state.running)

    @property
    def waiting(self) -> Sequence[RequestView]:
        """Requests without a batch slot that may be admitted now, in the order of `rank`."""
        return WaitingView(self._queue())

    @property
    def num_waiting(self) -> int:
        """Number of requests without a batch slot, ready or not."""
        state = self._state
        return len(self._queue()) + len(state.held_requests) + len(state.loads)

    @property
    def tokens_left(self) -> int:
        """Number of tokens of this step's budget that are not granted yet."""
        return self._state.draft.tokens_left

    @property
    def seats_left(self) -> int:
        """Number of free batch slots."""
        return self._state.rows.num_free

    @property
    def num_free_blocks(self) -> int:
        """Number of KV blocks that can be allocated now."""
        return self._state.kv_cache.num_free_blocks

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self._state.kv_cache.block_size

    def num_cached_tokens(self, request: RequestView) -> int:
        """Return how many tokens of the request the prefix cache holds. Changes nothing."""
        return self._state.num_cached_tokens(cast("Request", request))

    def num_uncomputed_tokens(self, request: RequestView) -> int:
        """Return the number of known or pending tokens that are not computed yet."""
        return cast("Request", request).num_uncomputed_tokens

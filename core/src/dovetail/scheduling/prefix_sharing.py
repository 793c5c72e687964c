"""Prefixes that requests have in common: each block is computed once, also of equal new prompts.

A waiting request whose next block another one computes in this step is passed over: it keeps its
place in the queue and is asked for again in the next step, when the block can be found. So copies
of a prompt start one step after it, or as soon as it has left what they share behind.
"""

from __future__ import annotations

from dovetail.kv_cache.hit import Hit
from dovetail.request import Request
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.scheduler_state import MAX_BLOCKS_HASHED, SchedulerState

MAX_BLOCKS_FOUND = 32_768
"""Cached blocks that one step gives to requests that it admits: each takes time, too."""

MIN_BLOCKS_HASHED = 256
"""Of each prompt beyond `MAX_BLOCKS_HASHED`, so that a long one holds no short one up. At twice
that limit the step admits nobody more."""

MAX_PASSED_OVER = 4_096
"""Requests that one step passes over; behind them it admits nobody more."""

BLOCKS_A_LOOKUP = 64
"""A look-up of so many blocks takes as long as giving one."""


class PrefixSharing:
    """Looks up prefixes, and finds out who waits for whose blocks."""

    def __init__(self, state: SchedulerState, host: PolicyHost) -> None:
        self._state = state
        self._host = host
        self._leaders: dict[Request, Request] = {}
        self._leaders_before: dict[Request, Request] = {}
        self._num_blocks_found = 0
        self._num_passed_over = 0

    def begin_step(self) -> None:
        """Forget the last step but for who was passed over, and because of whom."""
        self._leaders_before, self._leaders = self._leaders, {}
        self._num_blocks_found = 0
        self._num_passed_over = 0

    def find(self, request: Request) -> Hit | None:
        """Return what is cached of a waiting request; None if it is passed over in this step."""
        if self.must_wait(request):
            return None
        hit = self.lookup(request)
        return None if self.follows(request, hit) else hit

    def must_wait(self, request: Request) -> bool:
        """Return whether `request` cannot be looked up in this step; it is passed over then.

        Its prompt is too long to be hashed in one step, or it still follows who led it.
        """
        draft = self._state.draft
        most = max(MIN_BLOCKS_HASHED, MAX_BLOCKS_HASHED - draft.num_blocks_hashed)
        num_hashed = self._state.kv_cache.prepare_lookup(request, most)
        draft.num_blocks_hashed += num_hashed
        if num_hashed >= most:
            self._pass_over(request)
            return True
        return self._still_follows(request)

    @property
    def is_enough(self) -> bool:
        """Whether this step has looked up so much already that nobody more is admitted in it."""
        draft = self._state.draft
        return (
            self._num_passed_over >= MAX_PASSED_OVER
            or draft.num_blocks_hashed > 2 * MAX_BLOCKS_HASHED
            or (self._num_blocks_found > MAX_BLOCKS_FOUND and not draft.empty)
        )

    def lookup(self, request: Request) -> Hit:
        """Return the longest prefix that is cached here or can be loaded."""
        hit = self._state.loads.lookup(request)
        num_looked_up = request.num_tokens // self._state.kv_cache.block_size
        self._num_blocks_found += len(hit.blocks[0]) + num_looked_up // BLOCKS_A_LOOKUP
        return hit

    def note_run(self, request: Request) -> None:
        """Note which block a run that was granted begins with, if it computes known tokens."""
        start = request.num_computed_tokens
        if start >= request.num_prompt_tokens and start + 1 >= len(request.token_ids):
            return  # it decodes
        kv_cache = self._state.kv_cache
        key = kv_cache.block_key(request, start // kv_cache.block_size)
        if key:
            self._state.draft.computing[key] = request

    def follows(self, request: Request, hit: Hit) -> bool:
        """Return whether another one computes the block after `hit` in this step.

        `request` is passed over then.
        """
        draft, kv_cache = self._state.draft, self._state.kv_cache
        if not draft.computing or not kv_cache.shares(request):
            return False
        position = hit.num_tokens // kv_cache.block_size
        if position >= (request.num_tokens - 1) // kv_cache.block_size:
            return False  # the last block is computed in any case
        leader = draft.computing.get(kv_cache.block_key(request, position))
        if leader is None or leader not in draft.counts:
            return False
        self._leaders[request] = leader
        self._pass_over(request)
        return True

    def _still_follows(self, request: Request) -> bool:
        """Return whether who led `request` in the last step leads it in this one, too.

        One comparison, however long the prompts and many the copies.
        """
        leader = self._leaders_before.get(request)
        if leader is None or leader not in self._state.draft.counts:
            return False
        kv_cache = self._state.kv_cache
        position = leader.num_computed_tokens // kv_cache.block_size
        if position >= (request.num_tokens - 1) // kv_cache.block_size:
            return False
        if kv_cache.block_key(request, position) != kv_cache.block_key(leader, position):
            return False
        self._leaders[request] = leader
        self._pass_over(request)
        return True

    def _pass_over(self, request: Request) -> None:
        self._num_passed_over += 1
        self._host.waiting.discard(request)
        self._host.waiting.defer(request)

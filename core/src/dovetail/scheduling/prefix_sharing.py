"""Computes each block of a shared prefix once, even for equal prompts that arrive together.

A waiting request whose next block is computed by another request (its leader) in this step is
skipped: it keeps its position in the queue and is tried again in the next step, when the block is
cached. The other copies of a prompt therefore start one step after the first copy, or when the
first copy has computed the shared part.
"""

from __future__ import annotations

from dovetail.kv_cache.hit import Hit
from dovetail.request import Request
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.scheduler_state import MAX_BLOCKS_HASHED, SchedulerState

MAX_BLOCKS_FOUND = 32_768
"""Maximum cached blocks that one step assigns to admitted requests, because each takes time."""

MIN_BLOCKS_HASHED = 256
"""A step may hash this many blocks of each prompt even beyond `MAX_BLOCKS_HASHED`, so that a long
prompt does not delay short ones. At twice `MAX_BLOCKS_HASHED` the step admits no more requests."""

MAX_SKIPPED = 4_096
"""After this many requests are skipped, a step admits no more requests."""

BLOCKS_A_LOOKUP = 64
"""Looking up this many blocks takes as long as allocating one block."""


class PrefixSharing:
    """Looks up prefixes, and finds requests that wait for another request's blocks."""

    def __init__(self, state: SchedulerState, host: PolicyHost) -> None:
        self._state = state
        self._host = host
        self._leaders: dict[Request, Request] = {}
        self._leaders_before: dict[Request, Request] = {}
        self._num_blocks_found = 0
        self._num_skipped = 0

    def begin_step(self) -> None:
        """Reset the state for a new step, but keep the skipped requests and their leaders."""
        self._leaders_before, self._leaders = self._leaders, {}
        self._num_blocks_found = 0
        self._num_skipped = 0

    def find(self, request: Request) -> Hit | None:
        """Return the cached prefix of a waiting request, or None if it is skipped in this step."""
        if self.postpone_lookup(request):
            return None
        hit = self.lookup(request)
        return None if self.follows(request, hit) else hit

    def postpone_lookup(self, request: Request) -> bool:
        """Return whether `request` cannot be looked up in this step. If so, it is skipped.

        The reason is that its prompt is too long to be hashed in one step, or that its leader still
        computes a shared block.
        """
        draft = self._state.draft
        maximum = max(MIN_BLOCKS_HASHED, MAX_BLOCKS_HASHED - draft.num_blocks_hashed)
        num_hashed = self._state.kv_cache.prepare_lookup(request, maximum)
        draft.num_blocks_hashed += num_hashed
        if num_hashed >= maximum:
            self._skip(request)
            return True
        return self._keeps_leader(request)

    @property
    def is_exhausted(self) -> bool:
        """Whether this step has reached a look-up limit and admits no more requests."""
        draft = self._state.draft
        return (
            self._num_skipped >= MAX_SKIPPED
            or draft.num_blocks_hashed > 2 * MAX_BLOCKS_HASHED
            or (self._num_blocks_found > MAX_BLOCKS_FOUND and not draft.empty)
        )

    def lookup(self, request: Request) -> Hit:
        """Return the longest prefix that is cached or can be loaded."""
        hit = self._state.loads.lookup(request)
        num_looked_up = request.num_tokens // self._state.kv_cache.block_size
        self._num_blocks_found += len(hit.blocks[0]) + num_looked_up // BLOCKS_A_LOOKUP
        return hit

    def note_run(self, request: Request) -> None:
        """Record the first block that a granted request computes, if it computes known tokens."""
        start = request.num_computed_tokens
        if start >= request.num_prompt_tokens and start + 1 >= len(request.token_ids):
            return  # the request decodes
        kv_cache = self._state.kv_cache
        key = kv_cache.block_key(request, start // kv_cache.block_size)
        if key:
            self._state.draft.computing[key] = request

    def follows(self, request: Request, hit: Hit) -> bool:
        """Return whether another request computes the block after `hit` in this step.

        If so, `request` is skipped.
        """
        draft, kv_cache = self._state.draft, self._state.kv_cache
        if not draft.computing or not kv_cache.shares(request):
            return False
        position = hit.num_tokens // kv_cache.block_size
        if position >= (request.num_tokens - 1) // kv_cache.block_size:
            return False  # every request computes its own last block
        leader = draft.computing.get(kv_cache.block_key(request, position))
        if leader is None or leader not in draft.counts:
            return False
        self._leaders[request] = leader
        self._skip(request)
        return True

    def _keeps_leader(self, request: Request) -> bool:
        """Return whether the leader of `request` still computes the next block of `request`.

        Only the leader of the last step is considered. The check compares one block key, so its
        cost does not depend on the length and number of prompts.
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
        self._skip(request)
        return True

    def _skip(self, request: Request) -> None:
        self._num_skipped += 1
        self._host.waiting.discard(request)
        self._host.waiting.defer(request)

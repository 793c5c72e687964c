"""Grants the actions of a step: continue, admit, preempt, evict. Only this module grants.

The mechanism enforces the limits of batch slots, blocks, budget and chunk size for every policy. If
a running request needs a block and none is free, the policy chooses a victim, which loses its batch
slot and blocks and waits again. A step with such a preemption is under pressure and admits no
request. Batch slots and blocks that a plan in flight still uses become free when that plan has been
executed; until then requests that need them wait, and no further request is preempted for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.interfaces.policy import Denied, Grant
from dovetail.kv_cache.hit import Hit
from dovetail.request import Request, RequestStatus
from dovetail.scheduling.decode_batch import decodes
from dovetail.scheduling.draft import StepDraft
from dovetail.scheduling.grants import DENIALS, DONE, admitted, granted
from dovetail.scheduling.life_cycle import change_status
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.prefix_sharing import PrefixSharing
from dovetail.scheduling.scheduler_state import SchedulerState


class Mechanism:
    """Grants and revokes actions, one step at a time.

    max_piece: maximum prompt tokens of one request in a step. in_decode_batch: whether decoding
    requests may be batched; this makes planning faster and does not change the plans.
    under_pressure: whether this step has preempted a request for lack of blocks.
    """

    def __init__(self, state: SchedulerState, host: PolicyHost) -> None:
        limits = state.limits
        self._state = state
        self._host = host
        self._decode_batch = state.decode_batch
        self._encoder = state.encoder
        self._budget = limits.max_num_batched_tokens
        self._chunks = limits.enable_chunked_prefill
        self._lookahead = limits.num_lookahead_tokens
        self.max_piece = min(limits.long_prefill_token_threshold or self._budget, self._budget)
        self.in_decode_batch = not self._lookahead
        self.under_pressure = self._is_short = False
        self._denial = Denied.BUDGET
        self._sharing = PrefixSharing(state, host)
        self.num_preemptions = self.num_recomputed_tokens = 0

    def begin_step(self) -> None:
        """Begin the plan of a new step."""
        self._state.draft = StepDraft(self._budget, self._encoder)
        self.under_pressure = self._is_short = False
        self._sharing.begin_step()
        self._host.begin_step()

    # --- running requests -----------------------------------------------------------------------

    def continue_running(self) -> Grant:
        """Continue all running requests that have no grant and no hold, decoding requests first."""
        draft = self._state.draft
        before = draft.tokens_left
        if draft.decode_batch is None and not self._continue_decode_batch():
            self._decode_batch.remove_all_members()
        self._continue_outside_batch()
        if self.under_pressure and draft.empty:
            # A preempted request freed a batch slot, blocks and encoder outputs that others lacked.
            self.assign_loaded()
            self._continue_outside_batch()
        return granted(before - draft.tokens_left)

    def _continue_decode_batch(self) -> bool:
        """Run the decode batch as a whole, if the budget suffices for all members."""
        draft, decode_batch = self._state.draft, self._decode_batch
        if not self.in_decode_batch:
            return False
        decoding = [
            request
            for request in decode_batch.outside
            if decodes(request) and request not in draft.counts and request not in draft.held
        ]
        if len(decode_batch) + len(decoding) > draft.tokens_left:
            return False
        if decoding:
            decode_batch.add_members(decoding)
        if due := decode_batch.take_full_members():
            self._continue_full(due)
        draft.continue_decode_batch(decode_batch)
        return True

    def _continue_full(self, requests: Sequence[Request]) -> None:
        """Allocate one more block for each member of the decode batch whose last block is full."""
        new_blocks = self._state.kv_cache.next_blocks(requests)
        if new_blocks is not None:
            self._state.draft.grow_each(*new_blocks)
            return
        for request in requests:
            end = request.num_computed_tokens + 1
            if request in self._decode_batch and not self._hold_blocks(request, end):
                self._leave_decode_batch(request)

    def _continue_outside_batch(self) -> None:
        """Continue the requests outside of the decode batch one by one."""
        outside = tuple(self._decode_batch.outside)
        decoding: list[Request] = []
        if not self._lookahead:  # with drafts, decoding requests cannot be distinguished
            decoding = [request for request in outside if decodes(request)]
        if decoding:
            earlier = tuple(self._state.draft.counts)
            self._continue_each(decoding)
            self._state.draft.move_back(earlier)
        if len(decoding) < len(outside):
            self._continue_each(outside)  # decoding requests were granted or denied before

    def _continue_each(self, requests: Sequence[Request]) -> None:
        draft = self._state.draft
        for request in requests:
            if not draft.tokens_left:
                break
            num_left = request.num_uncomputed_tokens
            if not num_left or request.row < 0 or request in draft.counts or request in draft.held:
                continue
            start = request.num_computed_tokens
            num_tokens = self._piece(request, start, 0, whole=False)
            # No request is admitted while a running one gets no tokens.
            self._is_short |= not num_tokens and self._denial is Denied.BUDGET
            if num_tokens and self._hold_blocks(request, start + num_tokens):
                draft.grant(request, num_tokens)
                if start < request.num_prompt_tokens or start + 1 < len(request.token_ids):
                    self._sharing.note_run(request)

    def hold(self, request: Request) -> None:
        """Pause a running request, which has no grant yet, in this step."""
        self._leave_decode_batch(request)
        self._state.draft.held.add(request)

    def _leave_decode_batch(self, request: Request) -> None:
        if request in self._decode_batch:
            self._decode_batch.remove_member(request)

    def _hold_blocks(self, request: Request, num_tokens: int) -> bool:
        """Allocate missing blocks of a running request. Return False if there are not enough."""
        if num_tokens + self._lookahead > request.capacity:
            return self._grow(request, num_tokens)
        if not request.num_computed_tokens % self._state.kv_cache.block_size:
            self._state.kv_cache.commit(request)
        return True

    def run(self, request: Request, max_tokens: int, reserve: int, whole: bool) -> Grant:
        """Continue one running request. Hold blocks for at least `reserve` tokens in total."""
        if not request.num_uncomputed_tokens:
            return DENIALS[Denied.NOTHING]
        num_tokens = self._piece(request, request.num_computed_tokens, max_tokens, whole)
        if not num_tokens:
            return DENIALS[self._denial]
        end = request.num_computed_tokens + num_tokens
        hold = max(end, min(reserve, request.max_total_tokens))
        self._leave_decode_batch(request)
        if not self._hold_blocks(request, hold):
            return DENIALS[Denied.BLOCKS]
        self._grant(request, num_tokens)
        return granted(num_tokens)

    def _grant(self, request: Request, num_tokens: int) -> None:
        self._state.draft.grant(request, num_tokens)
        self._sharing.note_run(request)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate a running request's blocks for `num_tokens`. Preempt victims if necessary."""
        state = self._state
        num_tokens = self._with_lookahead(request, num_tokens)
        if num_tokens <= request.capacity:
            return True
        kv_cache = state.kv_cache
        kv_cache.commit(request)
        while (blocks := kv_cache.grow(request, num_tokens)) is None:
            if state.has_pending_releases:
                return False
            victim = self._host.victim(tuple(state.running))
            self.under_pressure = True
            self.evict(victim)
            if victim is request:
                return False
        state.draft.grow(request, blocks)
        return True

    def _with_lookahead(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens need blocks if drafts follow the first `num_tokens` tokens."""
        return min(num_tokens + self._lookahead, request.max_total_tokens)

    # --- waiting requests -----------------------------------------------------------------------

    def admit_waiting(self) -> None:
        """Admit waiting requests in the policy's order until one is denied."""
        host, state = self._host, self._state
        while state.draft.tokens_left and (request := host.peek()) is not None:
            admit = self.preempt_and_admit if host.policy.preempts else self.admit
            if not admit(request):
                break

    def admit(
        self, request: Request, max_tokens: int = 0, reserve: int = 0, whole: bool = False
    ) -> Grant:
        """Give a waiting request a batch slot and blocks, if available, and grant it tokens."""
        if denied := self._admission_denial(request):
            return DENIALS[denied]
        if not self._state.rows.num_free:
            return DENIALS[Denied.SEATS]
        if (hit := self._sharing.find(request)) is None:
            return DONE
        num_tokens = self._first_piece(request, hit, max_tokens, whole)
        if not num_tokens:
            return DENIALS[self._denial]
        if not self._take(request, hit, num_tokens, min(reserve, request.max_total_tokens)):
            return DENIALS[Denied.BLOCKS]
        return admitted(request, hit, num_tokens)

    def preempt_and_admit(self, request: Request, max_tokens: int = 0) -> Grant:
        """Admit a waiting request. Preempt requests of a worse rank if that makes enough room.

        The blocks of preempted requests may become free only when a plan in flight has been
        executed. `request` then keeps waiting, and is the first to be admitted in a later step.
        """
        state = self._state
        grant = self.admit(request, max_tokens)
        if grant.denied not in (Denied.SEATS, Denied.BLOCKS) or state.has_pending_releases:
            return grant
        if (hit := self._sharing.find(request)) is None:
            return DONE
        num_tokens = self._first_piece(request, hit, max_tokens, whole=False)
        if not num_tokens:
            return DENIALS[self._denial]
        leaving = self._find_victims(request, hit, hit.num_tokens + num_tokens)
        if not leaving:
            return grant
        for victim in leaving:
            self.evict(victim)
        if not state.rows.num_free or not self._take(request, hit, num_tokens):
            return DENIALS[Denied.NOT_READY]
        return admitted(request, hit, num_tokens)

    def can_grant(self) -> bool:
        """Return whether a running request, or the first waiting one, could get tokens now."""
        state = self._state
        if self.under_pressure or state.has_pending_releases or not state.draft.tokens_left:
            return False
        can_grow = state.kv_cache.num_free_blocks >= state.num_groups
        for request in state.running:
            has_room = can_grow or request.num_computed_tokens < request.capacity
            start = request.num_computed_tokens
            if has_room and request.num_uncomputed_tokens and self._piece(request, start, 0, False):
                return True
        first = self._host.peek()
        if first is None or not state.rows.num_free or self._admission_denial(first):
            return False
        hit = state.kv_cache.lookup(first)
        num_tokens = self._first_piece(first, hit, 0, whole=False)
        span = self._with_lookahead(first, hit.num_tokens + num_tokens)
        return num_tokens > 0 and state.kv_cache.fits(first, hit, span)

    def _admission_denial(self, request: Request) -> Denied | None:
        """Return why `request` is not admitted, apart from missing batch slots or blocks."""
        draft = self._state.draft
        if self.under_pressure:
            return Denied.PRESSURE
        if not draft.tokens_left or self._is_short or self._sharing.is_exhausted:
            return Denied.BUDGET
        # Plans in flight may still sample for an evicted request.
        not_ready = request.num_in_flight or request in draft.evicted
        return Denied.NOT_READY if not_ready else None

    def _first_piece(self, request: Request, hit: Hit, max_tokens: int, whole: bool) -> int:
        """Return the number of tokens that an admission would compute in its first step."""
        num_left = request.num_tokens - hit.num_tokens
        # A preempted request with more tokens than a step must be split.
        keep_whole = not self._chunks and num_left <= self.max_piece
        if keep_whole and 0 < max_tokens < num_left:
            self._denial = Denied.BUDGET
            return 0
        return self._piece(request, hit.num_tokens, max_tokens, whole or keep_whole)

    def _piece(self, request: Request, start: int, max_tokens: int, whole: bool) -> int:
        """Return how many tokens from `start` on to compute in this step.

        If the number is 0, `_denial` has the reason. whole: compute all of `max_tokens` or nothing.
        """
        num_left = request.num_uncomputed_tokens + request.num_computed_tokens - start
        requested = min(num_left, max_tokens) if max_tokens else num_left
        limit = min(self._state.draft.tokens_left, self.max_piece)
        num_tokens = 0 if whole and requested > limit else min(requested, limit)
        self._denial = Denied.BUDGET
        in_pieces = self._chunks or request.num_tokens > self.max_piece
        if not in_pieces and start + num_tokens < request.num_tokens:
            return 0  # only part of a prompt that must not be split
        if not num_tokens or start >= request.encoder_end:
            return num_tokens
        self._denial = Denied.ENCODER
        encodable = self._encoder.reach(request, start, start + num_tokens) - start
        return 0 if encodable < num_tokens and (whole or not in_pieces) else encodable

    def _find_victims(self, request: Request, hit: Hit, num_tokens: int) -> list[Request]:
        """Return the requests to preempt so that `request` fits. [] if it cannot fit."""
        fits = self._state.kv_cache.fits
        num_tokens = self._with_lookahead(request, num_tokens)
        candidates = self._host.worse_than(request, self._state.running)
        # Test all candidates first, because a request that cannot fit is tried in every step.
        if not candidates or not fits(request, hit, num_tokens, leaving=candidates):
            return []
        leaving: list[Request] = []
        while not leaving or not fits(request, hit, num_tokens, leaving=leaving):
            victim = self._host.victim(tuple(candidates))
            candidates.remove(victim)
            leaving.append(victim)
        return leaving

    def _take(self, request: Request, hit: Hit, num_tokens: int, reserve: int = 0) -> bool:
        """Give `request` a batch slot and blocks. Return False if there are not enough blocks.

        If its keys and values must be loaded asynchronously first, it gets only blocks.
        """
        state = self._state
        start = hit.num_tokens
        span = self._with_lookahead(request, start + num_tokens)
        if not state.kv_cache.admit(request, hit, span, reserve=reserve):
            return False
        self._host.waiting.discard(request)
        if hit.missing and state.loads.begin(request, hit):
            change_status(request, RequestStatus.WAITING_FOR_REMOTE_KVS)
            return True
        self._assign_slot(request, start)
        self._grant(request, num_tokens)
        return True

    def assign_loaded(self) -> None:
        """Give batch slots to requests whose loads have succeeded, longest-waiting first."""
        state = self._state
        while state.rows.num_free and (arrived := state.loads.take_loaded()):
            self._assign_slot(*arrived)

    def _assign_slot(self, request: Request, num_computed_tokens: int) -> None:
        """Give a batch slot to `request`, which already has its blocks."""
        state = self._state
        request.row, request.generation = state.rows.acquire()
        change_status(request, RequestStatus.RUNNING)
        request.num_computed_tokens = num_computed_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed_tokens
            request.admitted_ns = state.now_ns
        self._decode_batch.admit(request)
        state.draft.join(request)

    # --- requests that lose their row -----------------------------------------------------------

    def evict(self, request: Request) -> None:
        """Preempt a running request: release its batch slot, blocks and grant, and queue it."""
        joined = self._state.draft.revoke(request)
        lost = 0 if joined else request.num_computed_tokens
        self.release(request, known_to_worker=not joined)
        request.num_drafts = 0
        self._send_back(request, lost)

    def preempt_after_failed_load(self, request: Request) -> None:
        """Preempt a request between steps, because the load of its blocks has failed.

        Its results in plans in flight are dropped, even if it was evicted before.
        """
        lost, request.num_computed_tokens = request.num_computed_tokens, 0
        runs = request.row >= 0
        if runs:
            self.release(request)
        request.num_tokens_with_pending, request.num_drafts = request.num_tokens, 0
        if not request.num_output_tokens:
            request.num_cached_tokens = -1
        if runs:
            self._send_back(request, lost)

    def _send_back(self, request: Request, lost: int) -> None:
        change_status(request, RequestStatus.PREEMPTED)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.num_lost_tokens += lost
        self._host.defer(request, lost)

    def release(
        self, request: Request, *, known_to_worker: bool = True, finished: bool = False
    ) -> None:
        """Remove the batch slot and blocks of a running request. finished: whether it has ended."""
        state = self._state
        last_step = state.last_step if known_to_worker else -1
        state.kv_cache.commit(request)
        state.loads.release(request, finished=finished)
        state.kv_cache.free(request, last_step=last_step)
        self._encoder.free(request)
        self._decode_batch.release(request)
        if known_to_worker:
            state.builder.leave(request.row)
        state.rows.release(request.row, last_step=last_step)
        request.row = -1

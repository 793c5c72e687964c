"""Runs consecutive steps in which the same requests decode and nothing else can happen.

A simulator uses it to skip the plans and results of such steps. After a stretch, the state of the
scheduler is the same as after the same number of calls of `schedule` and `update_from_output`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from dovetail.request import Request, RequestStatus
from dovetail.scheduling.decode_batch import decodes
from dovetail.scheduling.mechanism import Mechanism
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.scheduler_state import SchedulerState
from dovetail.scheduling.step_result import StepResult, process_decode_batch


class DecodeStretch:
    """The decode batch of a scheduler without plans in flight, for consecutive steps.

    rows, starts: int32; row and next position of each member, in the order of a plan. Read only.
    max_steps: number of steps before a member reaches its length limit.
    """

    def __init__(
        self,
        state: SchedulerState,
        mechanism: Mechanism,
        finish: Callable[[Request, RequestStatus], None],
    ) -> None:
        """Create the stretch. finish: ends a request that holds a batch slot."""
        self._state = state
        self._mechanism = mechanism
        self._finish = finish
        self.rows = state.decode_batch.rows
        self.starts = state.decode_batch.starts
        self.max_steps = state.decode_batch.num_steps_to_limit

    @property
    def num_used_blocks(self) -> int:
        """Number of KV blocks in use."""
        kv_cache = self._state.kv_cache
        return kv_cache.num_blocks - 1 - kv_cache.num_free_blocks

    def run(self, num_steps: int, token_id: int) -> int:
        """Run at most `num_steps` steps in which each member samples `token_id`.

        Returns the number of steps that were run: fewer if there are not enough free blocks for
        the next one. Raises ValueError if `num_steps` is above `max_steps`, or if `token_id` is a
        stop token of a member.
        """
        decode_batch = self._state.decode_batch
        if num_steps > self.max_steps:
            raise ValueError(f"num_steps={num_steps} must be at most max_steps={self.max_steps}")
        if token_id in decode_batch.stop_ids:
            raise ValueError(f"token_id={token_id} is a stop token of a request")
        self._mechanism.begin_step()
        tokens = array("i", (token_id,)) * num_steps
        for request in decode_batch:
            request.token_ids.extend(tokens)
        num_run = self._grow(num_steps)
        if num_run < num_steps:
            for request in decode_batch:
                del request.token_ids[num_run - num_steps :]
        if num_run:
            decode_batch.end_skipped(num_run)
            self._state.builder.build()  # the first plan contains the pending changes of rows
            self._end(num_run - 1)
        return num_run

    def run_last(self, token_ids: array[int], now_ns: int) -> list[Request] | None:
        """Run one more step, in which members may end. Return the members that have ended.

        Call it after `run` has run at least one step. token_ids: int32; the token that each member
        samples. now_ns: the time at the end of the step. Returns None if there are not enough free
        blocks; then nothing has changed.
        """
        state, decode_batch = self._state, self._state.decode_batch
        due = decode_batch.take_full_members()
        if due and state.kv_cache.next_blocks(due) is None:
            return None
        record = decode_batch.take_step()
        self._end(1)
        state.now_ns = now_ns
        step_result = StepResult()
        process_decode_batch(step_result, record, token_ids)
        for request, status in step_result.ended:
            self._finish(request, status)
        return [request for request, _ in step_result.ended]

    def _grow(self, num_steps: int) -> int:
        """Allocate the blocks of at most `num_steps` steps. Return the number of steps."""
        state, decode_batch = self._state, self._state.decode_batch
        num_run = num_rounds = 0
        while num_run < num_steps:
            num_left = num_steps - num_run
            # The second attempt succeeds more often, because all earlier blocks are then committed.
            if num_rounds < 2 and self._grow_ahead(num_left):
                decode_batch.skip_steps(num_left)
                return num_steps
            num_rounds += 1
            due = decode_batch.take_full_members()
            if due and state.kv_cache.next_blocks(due) is None:
                break
            count = min(num_left, decode_batch.num_steps_to_full_members)
            decode_batch.skip_steps(count)
            num_run += count
        return num_run

    def _grow_ahead(self, num_steps: int) -> bool:
        """Allocate the blocks of all steps at once. Return False if it must be done step by step.

        Each member fills a block every `block_size` steps, so the members take turns.
        """
        kv_cache = self._state.kv_cache
        members, num_blocks = [], 0
        for num_before, request in self._state.decode_batch.find_turns(num_steps):
            if request.capacity != request.num_computed_tokens + num_before:
                return False
            members.append(request)
            num_blocks += (num_steps - 1 - num_before) // kv_cache.block_size + 1
        return not members or kv_cache.grow_in_turn(members, num_blocks)

    def _end(self, num_steps: int) -> None:
        """Assign ids to `num_steps` more plans, and record that all plans have been executed."""
        state = self._state
        state.builder.step_id += num_steps
        state.last_step = state.builder.step_id - 1
        state.rows.executed(state.last_step)
        state.kv_cache.executed(state.last_step)


def begin_stretch(
    state: SchedulerState,
    mechanism: Mechanism,
    host: PolicyHost,
    finish: Callable[[Request, RequestStatus], None],
) -> DecodeStretch | None:
    """Return the next steps as a stretch, or None if anything but decoding may happen in them.

    A stretch requires one full-attention KV-cache group, no drafts, no plan in flight, and a policy
    without its own plans and step hooks. In addition, either no request waits, or all batch slots
    are in use and no waiting request can preempt a running one.
    """
    decode_batch, waiting = state.decode_batch, host.waiting
    if not decode_batch.running or not mechanism.in_decode_batch:
        return None
    if (outside := decode_batch.outside) and not all(map(decodes, outside)):
        return None
    if host.plans or host.wants_granted or host.wants_output:
        return None
    if not state.kv_cache.is_plain or state.has_pending_releases:
        return None
    if state.held_requests or state.loads:
        return None
    if len(waiting) and (
        state.rows.num_free or host.policy.preempts or not host.policy.static_rank
    ):
        return None
    if len(decode_batch.running) > state.limits.max_num_batched_tokens:
        return None
    if outside:
        decode_batch.add_members(outside)  # as the next step does
    return DecodeStretch(state, mechanism, finish)

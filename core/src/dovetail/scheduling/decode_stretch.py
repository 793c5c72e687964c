"""Runs consecutive steps in which the same requests decode and nothing else can happen.

A simulator uses it to skip the plans and results of such steps. After a stretch, the state of the
scheduler is the same as after the same number of calls of `schedule` and `update_from_output`.
"""

from __future__ import annotations

from array import array

from dovetail.request import Request
from dovetail.scheduling.decode_batch import DecodeBatch, decodes
from dovetail.scheduling.mechanism import Mechanism
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.scheduler_state import SchedulerState


class DecodeStretch:
    """The decode batch of a scheduler without plans in flight, for consecutive steps.

    rows, starts: int32; row and next position of each member, in the order of a plan. Read only.
    max_steps: number of steps before a member reaches its length limit.
    """

    def __init__(self, state: SchedulerState, mechanism: Mechanism) -> None:
        self._state = state
        self._mechanism = mechanism
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
        state, decode_batch = self._state, self._state.decode_batch
        if num_steps > self.max_steps:
            raise ValueError(f"num_steps={num_steps} must be at most max_steps={self.max_steps}")
        if token_id in decode_batch.stop_ids:
            raise ValueError(f"token_id={token_id} is a stop token of a request")
        self._mechanism.begin_step()
        sampled: dict[Request, int] = {}
        steps = 0
        while steps < num_steps:
            if due := decode_batch.take_full_members():
                for request in due:
                    _append(request, token_id, steps - sampled.get(request, 0))
                    sampled[request] = steps
                if state.kv_cache.next_blocks(due) is None:
                    break
            count = min(num_steps - steps, decode_batch.num_steps_to_full_members)
            decode_batch.skip_steps(count)
            steps += count
        for request in decode_batch:
            _append(request, token_id, steps - sampled.get(request, 0))
        self._end(decode_batch, steps)
        return steps

    def _end(self, decode_batch: DecodeBatch, num_steps: int) -> None:
        state = self._state
        if not num_steps:
            return
        decode_batch.end_skipped(num_steps)
        state.builder.build()  # the first plan contains the pending changes of rows
        state.builder.step_id += num_steps - 1
        state.last_step = state.builder.step_id - 1
        state.rows.executed(state.last_step)
        state.kv_cache.executed(state.last_step)


def begin_stretch(
    state: SchedulerState, mechanism: Mechanism, host: PolicyHost
) -> DecodeStretch | None:
    """Return the next steps as a stretch, or None if anything but decoding may happen in them.

    A stretch requires one full-attention KV-cache group, no drafts, a policy without its own plans
    and hooks for steps, and that no request waits, or that all batch slots are in use and a waiting
    request cannot preempt a running one. No plan may be in flight.
    """
    decode_batch, waiting = state.decode_batch, host.waiting
    if not decode_batch.running or not mechanism.in_decode_batch:
        return None
    if host.plans or host.wants_granted or host.wants_output:
        return None
    if state.kv_cache.next_blocks(()) is None:  # several groups, or a window
        return None
    if state.held_requests or state.loads or state.has_pending_releases:
        return None
    if len(waiting) and (
        state.rows.num_free or host.policy.preempts or not host.policy.static_rank
    ):
        return None
    if len(decode_batch.running) > state.limits.max_num_batched_tokens:
        return None
    if outside := decode_batch.outside:
        if not all(map(decodes, outside)):
            return None
        decode_batch.add_members(outside)  # as the next step does
    return DecodeStretch(state, mechanism)


def _append(request: Request, token_id: int, count: int) -> None:
    """Append `token_id` to the known tokens of `request`, `count` times."""
    if count:
        request.token_ids.extend(array("i", (token_id,)) * count)

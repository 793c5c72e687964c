"""The mechanism: continuous batching over rows and KV blocks, ordered by a policy.

No phases: a request has tokens, some of them computed, and a step brings some forward. Running
requests are served first, in the order of their admission; then waiting ones in the policy's order,
while budget, rows and blocks last. A running request that needs a block takes it from a victim of
the policy's choice, who loses its row and its work and waits again; a step that does so admits
nobody. The policy wishes; rows, blocks and the budget are granted here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import (
    Depth,
    EngineCoreOutputs,
    SchedulerContext,
    SchedulerInterface,
    SchedulerStats,
)
from dovetail.kv_cache.manager import KVCacheManager
from dovetail.plan import SchedulerOutput, StepBuilder
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.result import ModelRunnerOutput
from dovetail.rows import RowAllocator
from dovetail.scheduling.draft import StepDraft
from dovetail.scheduling.settlement import settle
from dovetail.scheduling.view import View
from dovetail.scheduling.waiting_queue import HeapQueue, SortedQueue, WaitingQueue


def _overrides(policy: Policy, hook: str) -> bool:
    return getattr(type(policy), hook) is not getattr(Policy, hook)


class Scheduler(SchedulerInterface):
    """The core's scheduler. Subclasses name their policy; an instance may be given another one."""

    policy_cls: ClassVar[type[Policy]] = Policy

    def __init__(self, context: SchedulerContext) -> None:
        self.limits = context.limits
        make: Callable[..., Policy] = context.policy or self.policy_cls
        options = context.policy_options
        self.policy: Policy = make(options=options) if options else make()
        self._kv_cache = KVCacheManager(
            context.kv_cache, enable_prefix_caching=context.limits.enable_prefix_caching
        )
        self._rows = RowAllocator(context.limits.max_num_seqs)
        self._builder = StepBuilder(num_groups=len(context.kv_cache.groups))
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []
        self._in_flight: deque[list[Request]] = deque()
        self._last_step = -1
        self._sequence = 0
        self._num_preemptions = 0
        self._num_recomputed_tokens = 0
        self.view = View(
            now_ns=context.clock.now_ns, running=self._running, kv_cache=self._kv_cache
        )
        queue = HeapQueue if self.policy.static_rank else SortedQueue
        self._waiting: WaitingQueue = queue(lambda request: self.policy.rank(request, self.view))
        self.view.watch(self._waiting)
        self._hears_granted = _overrides(self.policy, "on_granted")
        self._hears_output = _overrides(self.policy, "on_output")

    def add_request(self, request: EngineCoreRequest) -> None:
        """Take a request in. Raise RequestError if it can never run or its id is in use."""
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another.")
        limit = min(self.limits.max_model_len, self._kv_cache.max_tokens)
        num_tokens = len(request.prompt_token_ids)
        if not 0 < num_tokens < limit:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; it needs 1 to {limit - 1}.",
                parameter="prompt",
            )
        if not self.limits.enable_chunked_prefill and num_tokens > self._max_whole_prompt:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, and a step without chunked prefill takes "
                f"{self._max_whole_prompt}; raise max_num_batched_tokens.",
                parameter="prompt",
            )
        taken = Request(request, max_model_len=limit, sequence=self._sequence)
        self._sequence += 1
        self._requests[taken.request_id] = taken
        self._waiting.push(taken)
        self.policy.on_arrival(taken, self.view)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests at once, in any state; return the ids that were alive. Unknown: ignored."""
        aborted = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
                aborted.append(request_id)
        return aborted

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The plan is empty if nothing can run."""
        draft = StepDraft(self.limits.max_num_batched_tokens)
        num_preemptions = self._num_preemptions
        self._continue_running(draft)
        if self._waiting and num_preemptions == self._num_preemptions:
            self._admit_waiting(draft)
        plan = draft.emit(self._builder)
        for request, count in zip(draft.granted, draft.counts, strict=True):
            if count > 1:
                self._kv_cache.commit(request)
        if self._hears_granted:
            for request, count in zip(draft.granted, draft.counts, strict=True):
                self.policy.on_granted(request, count, self.view)
        self._last_step = plan.step_id
        self._in_flight.append(draft.granted)
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Take in the result of the oldest plan that is out; return what it gave to whom."""
        self._rows.executed(plan.step_id)
        settlement = settle(self._in_flight.popleft(), plan, output)
        if self._hears_output:
            for request, num_tokens in zip(settlement.advanced, settlement.counts, strict=True):
                self.policy.on_output(request, num_tokens, self.view)
        for request, status in settlement.ended:
            self._finish(request, status)
        return settlement.outputs(self._stats(plan))

    def depth(self) -> Depth:
        """Return how many requests wait and run. Both 0: there is nothing left to do."""
        return Depth(num_waiting=len(self._waiting), num_running=len(self._running))

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; return False, changing nothing, if blocks are in use."""
        return self._kv_cache.reset_prefix_cache()

    def shutdown(self) -> None:
        """Let go of everything; nothing is called after it. May be called twice."""
        self.abort_requests(list(self._requests))

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, rows and blocks do not fit together. For tests."""
        self._kv_cache.check_integrity(self._running)
        rows = [request.row for request in self._running]
        assert len(set(rows)) == len(rows), "two requests share a row"
        assert all(request.row == -1 and not request.blocks for request in self._waiting)
        alive = len(self._running) + len(self._waiting)
        assert alive == len(self._requests), "a request is neither waiting nor running"
        assert self._rows.num_free + len(rows) <= self._rows.num_rows

    @property
    def _max_whole_prompt(self) -> int:
        threshold = self.limits.long_prefill_token_threshold
        return min(self.limits.max_num_batched_tokens, threshold or 2**31)

    def _continue_running(self, draft: StepDraft) -> None:
        threshold = self.limits.long_prefill_token_threshold
        grant = draft.grant
        for request in self._running[:]:
            if not draft.tokens_left:
                break
            wanted = request.num_tokens_with_pending - request.num_computed_tokens
            if request.num_tokens_with_pending >= request.max_total_tokens or request.row < 0:
                continue  # its last token is on the way, or it gave way earlier in this step
            if wanted > 1:
                wanted = min(wanted, threshold or wanted, draft.tokens_left)
            end = request.num_computed_tokens + wanted
            if end > request.capacity and not self._grow(request, end, draft):
                continue
            grant(request, wanted)

    def _grow(self, request: Request, num_tokens: int, draft: StepDraft) -> bool:
        self._kv_cache.commit(request)
        blocks = self._kv_cache.grow(request, num_tokens)
        while blocks is None:
            victim = self.policy.victim(self._running, self.view)
            self._preempt(victim, draft)  # type: ignore[arg-type]  # a view is a request
            if victim is request:
                return False
            blocks = self._kv_cache.grow(request, num_tokens)
        draft.grow(request, blocks)
        return True

    def _admit_waiting(self, draft: StepDraft) -> None:
        waiting = self._waiting
        waiting.begin_step()
        while draft.tokens_left and (request := waiting.peek()) is not None:
            if request.num_tokens != request.num_tokens_with_pending:
                break  # preempted while a step that samples for it is out
            if not self._admit(request, draft):
                break

    def _admit(self, request: Request, draft: StepDraft) -> bool:
        cached = self._kv_cache.lookup(request)
        start = len(cached) * self._kv_cache.block_size
        wanted = request.num_tokens - start
        # Work lost to a preemption may have outgrown a step: it comes back in pieces, or never.
        if self.limits.enable_chunked_prefill or wanted > self._max_whole_prompt:
            threshold = self.limits.long_prefill_token_threshold
            wanted = min(wanted, threshold or wanted, draft.tokens_left)
        elif wanted > draft.tokens_left:
            return False
        if not self._rows.num_free and not self._displace(request, draft):
            return False
        if not self._rows.num_free:
            return False  # a step that is out still names the row that was just given up
        while not self._kv_cache.admit(request, cached, start + wanted):
            if not self._displace(request, draft):
                return False
            cached = self._kv_cache.lookup(request)
            start = len(cached) * self._kv_cache.block_size
            wanted = min(request.num_tokens - start, wanted)
        self._waiting.pop()
        request.row, request.generation = self._rows.acquire()
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = start
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
        self._running.append(request)
        draft.join(request)
        draft.grant(request, wanted)
        return True

    def _displace(self, request: Request, draft: StepDraft) -> bool:
        """Preempt a running request of a worse rank than `request`'s, if the policy does that."""
        if not self.policy.preempts or not self._running:
            return False
        victim = self.policy.victim(self._running, self.view)
        if self.policy.rank(victim, self.view) <= self.policy.rank(request, self.view):
            return False
        self._preempt(victim, draft)  # type: ignore[arg-type]  # a view is a request
        return True

    def _preempt(self, request: Request, draft: StepDraft) -> None:
        lost = request.num_computed_tokens
        self._release(request, known_to_worker=not draft.revoke(request))
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._num_recomputed_tokens += lost
        self._waiting.push(request)
        self.policy.on_evict(request, lost, self.view)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        del self._requests[request.request_id]
        if request.row >= 0:
            self._release(request)
        else:
            self._waiting.discard(request)
        request.status = status
        self.policy.on_finish(request, self.view)

    def _release(self, request: Request, *, known_to_worker: bool = True) -> None:
        """Take row and blocks from a running request."""
        self._kv_cache.commit(request)
        self._kv_cache.free(request)
        self._running.remove(request)
        if known_to_worker:
            self._builder.leave(request.row)
        self._rows.release(request.row, last_step=self._last_step)
        request.row = -1

    def _stats(self, plan: SchedulerOutput) -> SchedulerStats:
        return SchedulerStats(
            step_id=plan.step_id,
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_scheduled_tokens=plan.total_num_tokens,
            kv_cache_usage=self._kv_cache.usage,
            prefix_queries=self._kv_cache.prefix_queries,
            prefix_hits=self._kv_cache.prefix_hits,
            num_preemptions=self._num_preemptions,
            num_recomputed_tokens=self._num_recomputed_tokens,
        )

"""The core's scheduler: continuous batching over batch slots and KV blocks, ordered by a policy.

Prefill and decode are not separate phases: a step computes some of a request's remaining tokens. By
default running requests are served first, decoding requests before prefills; then waiting requests
in the policy's order, while budget, batch slots and blocks are available. A policy may also plan by
yielding one action per request (`policy_driver`); the same mechanism grants both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import ClassVar

from dovetail.errors import RequestError
from dovetail.interfaces.policy import Policy
from dovetail.interfaces.scheduler import (
    Depth,
    EngineCoreOutputs,
    Finished,
    PauseScope,
    SchedulerContext,
    SchedulerInterface,
    SchedulerStats,
)
from dovetail.plan import SchedulerOutput
from dovetail.plugins.construction import construct
from dovetail.request import FINISH_REASONS, EngineCoreRequest, Request, RequestStatus
from dovetail.result import ModelRunnerOutput
from dovetail.scheduling.decode_stretch import DecodeStretch, begin_stretch
from dovetail.scheduling.draft import StepRecord
from dovetail.scheduling.life_cycle import change_status
from dovetail.scheduling.mechanism import Mechanism
from dovetail.scheduling.policy_driver import PolicyDriver
from dovetail.scheduling.policy_host import PolicyHost
from dovetail.scheduling.scheduler_state import SchedulerState
from dovetail.scheduling.step_result import process_result
from dovetail.scheduling.view import View


class Scheduler(SchedulerInterface):
    """The core's scheduler. Subclasses set a default policy, which `context.policy` replaces."""

    policy_cls: ClassVar[type[Policy]] = Policy
    provides: ClassVar[frozenset[str]] = frozenset({"encoder", "gates", "kv_connector"})

    def __init__(self, context: SchedulerContext) -> None:
        self.limits = context.limits
        policy_cls = context.policy or self.policy_cls
        policy: Policy = construct("policy", policy_cls, options=context.policy_options)
        self._clock = context.clock
        self._state = SchedulerState(context)
        self._host = PolicyHost(context, policy, self._state)
        self._mechanism = Mechanism(self._state, self._host)
        self._policy_driver = PolicyDriver(self._state, self._mechanism, self._host)
        self._in_flight: deque[StepRecord] = deque()
        self._num_drafts = self._num_accepted = 0
        self._sequence = 0
        self._num_aborted = 0
        self._pause: PauseScope | None = None

    @property
    def policy(self) -> Policy:
        """The active policy."""
        return self._host.policy

    @property
    def view(self) -> View:
        """The policy's view of this scheduler."""
        return self._host.view

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add a request. Raise RequestError if it can never run or its id is in use."""
        state = self._state
        if request.request_id in state.requests:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another.")
        limit = min(self.limits.max_model_len, state.kv_cache.max_tokens)
        num_tokens, max_whole = len(request.prompt_token_ids), self._mechanism.max_piece
        longest = limit if request.pooling_params is not None else limit - 1
        if not 0 < num_tokens <= longest:
            raise RequestError(
                f"the prompt has {num_tokens} tokens; the allowed range is 1 to {longest}.",
                parameter="prompt",
            )
        if not self.limits.enable_chunked_prefill and num_tokens > max_whole:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, but without chunked prefill a step takes "
                f"at most {max_whole}; raise max_num_batched_tokens.",
                parameter="prompt",
            )
        if request.encoder_inputs:
            state.encoder.check(request)
        gates = state.held_requests.find_holding_gates(request)
        state.now_ns = self._clock.now_ns()
        taken = Request(
            request,
            max_model_len=limit,
            sequence=self._sequence,
            max_drafts=self.limits.num_lookahead_tokens,
        )
        self._sequence += 1
        state.requests[taken.request_id] = taken
        if not state.held_requests.enter(taken, gates, state.now_ns):
            self._host.push(taken)
        self._host.notify_arrival(taken)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """Abort requests immediately, in any state. Return their ids and ignore unknown ids."""
        self._state.now_ns = self._clock.now_ns()
        aborted = []
        for request_id in request_ids:
            request = self._state.requests.get(request_id)
            if request is not None:
                self._finish(request, RequestStatus.FINISHED_ABORTED)
                aborted.append(request_id)
        self._num_aborted += len(aborted)
        return aborted

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. The plan is empty if nothing can run."""
        state, mechanism, host = self._state, self._mechanism, self._host
        state.now_ns = self._clock.now_ns()
        if state.held_requests:
            for request in state.held_requests.take_ready():
                host.push(request)
        if late := state.loads.cancel_late_loads():
            self._process_loads(late)
        mechanism.begin_step()
        if self._pause is not PauseScope.ALL:
            self._plan_step()
        draft = state.draft
        mechanism.num_recomputed_tokens += draft.take_lost_tokens()
        state.builder.transfer(state.loads.take_instructions())
        plan, record = draft.emit(state.builder)
        for request, count in draft.counts.items():
            if count > 1:
                state.kv_cache.commit(request)
                state.loads.offer(request)
        state.last_step = plan.step_id
        self._in_flight.append(record)
        if host.wants_granted:
            host.notify_granted(record.grants)
        record.schedule_ns = self._clock.now_ns() - state.now_ns
        return plan

    def _plan_step(self) -> None:
        mechanism, host = self._mechanism, self._host
        if self._state.loads:
            mechanism.assign_loaded()
        if host.plans:
            self._policy_driver.plan_step()
        else:
            mechanism.continue_running()
            if not mechanism.under_pressure:
                mechanism.admit_waiting()

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Process the result of the oldest plan in flight. Return the outputs of its requests."""
        state, host = self._state, self._host
        state.now_ns = self._clock.now_ns()
        state.rows.executed(plan.step_id)
        state.kv_cache.executed(plan.step_id)
        if output.kv_transfer:
            self._process_loads(state.loads.add(output.kv_transfer))
        failed = self._end_failed_runs(output.errors) if output.errors else []
        record = self._in_flight.popleft()
        step_result = process_result(record, plan, output)
        self._num_drafts += step_result.num_drafts
        self._num_accepted += step_result.num_accepted
        if host.wants_output:
            host.notify_output(zip(step_result.advanced, step_result.counts, strict=True))
        for request, status in step_result.ended:
            self._finish(request, status)
        failed += self._end_failed() if state.held_requests else ()
        return step_result.outputs(self._stats(plan, record.schedule_ns), failed)

    def decode_stretch(self) -> DecodeStretch | None:
        """Return the next steps if only decoding can happen in them, otherwise None."""
        if self._in_flight or self._pause is not None:
            return None
        return begin_stretch(self._state, self._mechanism, self._host, self._finish)

    def depth(self) -> Depth:
        """Return the counts of requests. If `num_active` is 0, no step is needed."""
        state, num_running, num_paused = self._state, len(self._state.running), 0
        num_waiting = len(self._host.waiting) + len(state.held_requests) + len(state.loads)
        if self._pause is PauseScope.NEW:
            num_paused = len(state.held_requests)
        elif self._pause is PauseScope.ALL:
            num_paused = num_waiting + num_running
        return Depth(
            num_waiting=num_waiting,
            num_running=num_running,
            num_paused=num_paused,
            num_transfers=state.loads.num_transfers + state.kv_cache.num_due,
        )

    def pause(self, scope: PauseScope) -> None:
        """Stop requests from running until `resume`. A later call replaces the scope."""
        self.resume()
        self._pause = scope
        if scope is PauseScope.NEW:
            waiting, held_requests, loads = (
                self._host.waiting,
                self._state.held_requests,
                self._state.loads,
            )
            new = [
                request
                for request in self._state.requests.values()
                if request.status is RequestStatus.WAITING
                and not (request in held_requests or request in loads)
            ]
            for request in new:
                waiting.discard(request)
            held_requests.close(new)

    def resume(self) -> None:
        """End a pause. Do nothing if the scheduler is not paused."""
        self._pause = None
        for request in self._state.held_requests.reopen():
            self._host.push(request)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes. Return False, changing nothing, if blocks are in use."""
        return self._state.kv_cache.reset_prefix_cache()

    def shutdown(self) -> None:
        """Release all resources. Only `shutdown` may be called afterwards."""
        self.abort_requests(list(self._state.requests))
        self._state.held_requests.shutdown()
        self._state.loads.shutdown()

    def check_integrity(self) -> None:
        """Raise AssertionError if requests, batch slots and blocks are inconsistent. For tests."""
        state, waiting = self._state, self._host.waiting
        running, rows = state.running, state.rows
        loads = list(state.loads)
        state.kv_cache.check_integrity([*running, *loads])
        state.encoder.check_integrity(running)
        state.decode_batch.check_integrity()
        taken = [request.row for request in running]
        assert len(set(taken)) == len(taken), "two requests share a row"
        assert all(row >= 0 for row in taken), "a running request has no row"
        idle = [item for item in state.requests.values() if item.row < 0]
        assert all(load.blocks for load in loads), "a request with a load has no blocks"
        assert sum(bool(item.blocks) for item in idle) == len(loads), (
            "a waiting request without a load has blocks"
        )
        num_waiting = len(waiting) + len(state.held_requests) + len(loads)
        assert len(idle) == num_waiting, (
            "the queues do not contain exactly the requests without a row"
        )
        assert len(idle) + len(running) == len(state.requests), (
            "a request is not in the table of requests"
        )
        assert rows.num_free + rows.num_retiring + len(taken) == rows.num_rows, (
            "a row is neither free nor in use"
        )

    def _end_failed(self) -> list[Finished]:
        """End the requests that failed at a gate. Return the messages for the users."""
        news, ended = [], RequestStatus.FINISHED_ERROR
        for request, message in self._state.held_requests.take_failed(self._state.now_ns):
            self._end(request, ended)
            name, reason = request.request_id, FINISH_REASONS[ended]
            news.append(Finished(request_id=name, reason=reason, message=message))
        return news

    def _end_failed_runs(self, errors: Mapping[int, str]) -> list[Finished]:
        """End the requests of the oldest plan that have failed.

        errors: message by position in the plan.
        """
        requests, status = self._in_flight[0].requests, RequestStatus.FINISHED_ERROR
        news = []
        for run, message in errors.items():
            request = requests[run]
            if not request.status.finished:
                self._finish(request, status)
                name, reason = request.request_id, FINISH_REASONS[status]
                news.append(Finished(request_id=name, reason=reason, message=message))
        return news

    def _process_loads(self, ended: Iterable[tuple[Request, bool]]) -> None:
        """Let requests whose load succeeded wait for a batch slot. Queue the others again."""
        loads = self._state.loads
        for request, is_well in ended:
            if request in loads:
                change_status(request, RequestStatus.WAITING)
                if is_well:
                    loads.arrive(request)
                else:
                    self._drop_load(request, finished=False)
                    self._host.push(request)
            elif not is_well:
                for record in self._in_flight:
                    record.void(request)
                self._mechanism.preempt_after_failed_load(request)

    def _drop_load(self, request: Request, *, finished: bool) -> None:
        """Free the blocks of a request that has no batch slot."""
        state = self._state
        state.loads.discard(request)
        state.loads.release(request, finished=finished)
        state.kv_cache.free(request, last_step=-1)

    def _finish(self, request: Request, status: RequestStatus) -> None:
        for record in self._in_flight:
            record.drop(request)
        if request.row >= 0:
            self._mechanism.release(request, finished=True)
        elif request in self._state.loads:
            self._drop_load(request, finished=True)
        else:
            if not self._state.held_requests.discard(request):
                self._host.waiting.discard(request)
            self._state.loads.release(request, finished=True)  # its stores may be pending
        self._end(request, status)

    def _end(self, request: Request, status: RequestStatus) -> None:
        """Record the end of a request that has no batch slot and is not in the queue."""
        del self._state.requests[request.request_id]
        change_status(request, status)
        self._host.notify_finished(request)

    def _stats(self, plan: SchedulerOutput, schedule_ns: int) -> SchedulerStats:
        state, host, mechanism = self._state, self._host, self._mechanism
        kv_cache = state.kv_cache
        num_blocks = kv_cache.num_blocks - 1  # block 0 belongs to no request
        return SchedulerStats(
            step_id=plan.step_id,
            num_waiting=self.view.num_waiting,
            num_running=len(state.running),
            num_scheduled_tokens=plan.total_num_tokens,
            kv_cache_usage=kv_cache.usage,
            prefix_queries=kv_cache.prefix_queries,
            prefix_hits=kv_cache.prefix_hits,
            num_preemptions=mechanism.num_preemptions,
            num_recomputed_tokens=mechanism.num_recomputed_tokens,
            num_blocks=num_blocks,
            num_used_blocks=num_blocks - kv_cache.num_free_blocks,
            num_cached_blocks=kv_cache.num_cached,
            num_evictions=kv_cache.num_evictions,
            num_aborted=self._num_aborted,
            schedule_ns=schedule_ns,
            update_ns=self._clock.now_ns() - state.now_ns,
            policy=host.name,
            num_illegal_actions=host.num_illegal_actions,
            policy_failures=host.num_failures,
            num_idle_steps=host.num_idle_steps,
            num_drafts=self._num_drafts,
            num_accepted=self._num_accepted,
        )

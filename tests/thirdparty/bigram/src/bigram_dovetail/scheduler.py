"""A third-party scheduler for models without a cache: one request per step, in round-robin order.

It allocates rows but no blocks. A long prompt runs in chunks of the token budget, one chunk per
turn. It never preempts.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dovetail.errors import ConfigError, RequestError
from dovetail.interfaces import (
    Depth,
    EngineCoreOutputs,
    Finished,
    PauseScope,
    SchedulerContext,
    SchedulerInterface,
)
from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.request import FINISH_REASONS, EngineCoreRequest, Request, RequestStatus
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.rows import RowAllocator


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outstanding:
    """A plan in flight and its request, or None for an empty plan."""

    step_id: int
    request: Request | None


class RoundRobinScheduler(SchedulerInterface):
    """Serves the requests in round-robin order, one per step."""

    def __init__(self, context: SchedulerContext) -> None:
        if any(group.bytes_per_block for group in context.kv_cache.groups):
            raise ConfigError(
                "RoundRobinScheduler allocates no cache blocks, but this model has a KV cache. "
                "Use another scheduler_cls, such as 'fcfs'."
            )
        self._limits = context.limits
        self._rows = RowAllocator(context.limits.max_num_seqs)
        self._builder = StepBuilder(num_groups=len(context.kv_cache.groups))
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: deque[Request] = deque()
        self._out: deque[_Outstanding] = deque()
        self._last_step: dict[int, int] = {}
        self._step_id = -1
        self._pause: PauseScope | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add `request` to the waiting requests. Raise RequestError if it can never run."""
        limits, length = self._limits, len(request.prompt_token_ids)
        whole = not limits.enable_chunked_prefill
        maximum = min(limits.max_model_len - 1, limits.max_num_batched_tokens if whole else length)
        if request.request_id in self._requests:
            raise RequestError(f"the id {request.request_id!r} is in use; take another.")
        if not 1 <= length <= maximum:
            raise RequestError(f"a prompt of {length} tokens must have from 1 to {maximum}.")
        new_request = Request(request, max_model_len=limits.max_model_len)
        self._requests[request.request_id] = new_request
        self._waiting.append(new_request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests immediately, and drop their results in flight."""
        alive = [name for name in dict.fromkeys(request_ids) if name in self._requests]
        for name in alive:
            self._end(self._requests[name], RequestStatus.FINISHED_ABORTED)
        return alive

    def schedule(self) -> SchedulerOutput:
        """Plan a step of the next request that can run."""
        while not self._pause and self._waiting and self._rows.num_free:
            self._admit(self._waiting.popleft())
        request = None if self._pause is PauseScope.ALL else self._next()
        if request is not None:
            self._run(request)
        plan = self._builder.build()
        self._step_id = plan.step_id
        self._out.append(_Outstanding(step_id=plan.step_id, request=request))
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Append the sampled token to the request of the oldest plan. Finish a complete request."""
        out = self._out.popleft()
        if not out.step_id == plan.step_id == output.step_id:
            raise ValueError(f"step {out.step_id} is due, not {plan.step_id}, {output.step_id}")
        self._rows.executed(plan.step_id)
        request = out.request
        if request is None or request.status.finished:
            return EngineCoreOutputs()
        name = request.request_id
        # The plan has one run, so all data belongs to run 0.
        prompt_logprobs = _of_run_0(output.prompt_logprobs, name)
        if not output.token_ids:
            return EngineCoreOutputs(prompt_logprobs=prompt_logprobs)
        first = not request.num_output_tokens
        request.token_ids.extend(output.token_ids)
        return EngineCoreOutputs(
            request_ids=[name],
            num_new_tokens=array("i", output.num_sampled),
            token_ids=output.token_ids,
            finished=self._finish(request),
            logprobs=_of_run_0(output.logprobs, name),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens={name: 0} if first else {},
        )

    def depth(self) -> Depth:
        """Return the numbers of waiting and running requests."""
        num_waiting, num_running = len(self._waiting), len(self._running)
        paused = {None: 0, PauseScope.NEW: num_waiting, PauseScope.ALL: num_waiting + num_running}
        return Depth(
            num_waiting=num_waiting, num_running=num_running, num_paused=paused[self._pause]
        )

    def pause(self, scope: PauseScope) -> None:
        """Pause the admission of requests, or all requests, until `resume`."""
        self._pause = scope

    def resume(self) -> None:
        """Resume after a pause."""
        self._pause = None

    def reset_prefix_cache(self) -> bool:
        """Return True: nothing is cached."""
        return True

    def shutdown(self) -> None:
        """Remove all requests."""
        self.abort_requests(list(self._requests))

    def _admit(self, request: Request) -> None:
        request.row, request.generation = self._rows.acquire()
        request.status = RequestStatus.RUNNING
        self._builder.join(NewRequest.of(request))
        self._last_step[request.row] = self._step_id + 1
        self._running.append(request)

    def _next(self) -> Request | None:
        """Return the next request that has a token to compute, or None. Moves it to the end."""
        for _ in range(len(self._running)):
            request = self._running[0]
            self._running.rotate(-1)
            # If its last token is in flight, there is nothing to plan until the result.
            if request.num_tokens_with_pending < request.max_total_tokens:
                return request
        return None

    def _run(self, request: Request) -> None:
        start, known = request.num_computed_tokens, request.num_tokens_with_pending
        maximum = self._limits.max_num_batched_tokens
        if start < request.num_prompt_tokens and self._limits.enable_chunked_prefill:
            maximum = min(maximum, self._limits.long_prefill_token_threshold or maximum)
        num_tokens = min(known - start, maximum)
        samples = start + num_tokens == known
        self._builder.run(request.row, start, num_tokens, samples=samples)
        request.num_computed_tokens += num_tokens
        request.num_tokens_with_pending += samples
        self._last_step[request.row] = self._step_id + 1

    def _finish(self, request: Request) -> tuple[Finished, ...]:
        """Finish `request` if its last token is a stop token or reaches the length limit."""
        token, params = request.token_ids[-1], request.sampling_params
        stopped = token in request.stop_token_ids
        if stopped and request.num_output_tokens >= params.min_tokens:
            self._end(request, RequestStatus.FINISHED_STOPPED)
            requested = token if token in (params.stop_token_ids or ()) else None
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
            requested = None
        else:
            return ()
        reason = FINISH_REASONS[request.status]
        return (Finished(request_id=request.request_id, reason=reason, stop_reason=requested),)

    def _end(self, request: Request, status: RequestStatus) -> None:
        del self._requests[request.request_id]
        if request.status == RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._builder.leave(request.row)
            self._rows.release(request.row, last_step=self._last_step.pop(request.row))
            request.row = -1
        request.status = status


def _of_run_0(columns: Mapping[int, LogprobColumns], name: str) -> dict[str, LogprobColumns]:
    return {name: columns[0]} if 0 in columns else {}

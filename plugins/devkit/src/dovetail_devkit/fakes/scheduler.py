"""A fake scheduler: one request per step, round robin.

Requests are admitted in the order of arrival. At admission, a request gets a row and the maximum
number of blocks that it can need, and keeps them until it ends. There is no preemption, no prefix
cache and no policy.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping

from dovetail.errors import RequestError
from dovetail.interfaces.scheduler import (
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


class FakeScheduler(SchedulerInterface):
    """Runs one request per step, alternating between the requests with a row."""

    def __init__(self, context: SchedulerContext) -> None:
        self._limits = context.limits
        self._groups = context.kv_cache.groups
        self._free_blocks = list(range(context.kv_cache.num_blocks - 1, 0, -1))
        self._rows = RowAllocator(context.limits.max_num_seqs)
        self._builder = StepBuilder(num_groups=len(self._groups))
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: deque[Request] = deque()
        self._out: deque[tuple[int, Request | None]] = deque()
        self._last_step = -1
        self._pause: PauseScope | None = None

    def add_request(self, request: EngineCoreRequest) -> None:
        """Add `request` to the queue.

        Raises RequestError if it can never run or its id is in use.
        """
        limits, length = self._limits, len(request.prompt_token_ids)
        maximum = limits.max_model_len - 1
        if not limits.enable_chunked_prefill:
            maximum = min(maximum, limits.max_num_batched_tokens)
        if request.request_id in self._requests:
            raise RequestError(f"the id {request.request_id!r} is in use; choose another.")
        if not 1 <= length <= maximum:
            raise RequestError(f"the prompt has {length} tokens; it must have 1 to {maximum}.")
        taken = Request(request, max_model_len=limits.max_model_len)
        if self._num_blocks(taken) > len(self._free_blocks) + self._num_blocks_held():
            raise RequestError(f"the cache is too small for {taken.max_total_tokens} tokens.")
        self._requests[request.request_id] = taken
        self._waiting.append(taken)

    def abort_requests(self, request_ids: Iterable[str]) -> list[str]:
        """End requests. The results of plans in flight are ignored for these requests."""
        alive = [name for name in dict.fromkeys(request_ids) if name in self._requests]
        for name in alive:
            self._end(self._requests[name], RequestStatus.FINISHED_ABORTED)
        return alive

    def schedule(self) -> SchedulerOutput:
        """Plan a step for the next request that has tokens to run."""
        while not self._pause and self._waiting and self._can_admit(self._waiting[0]):
            self._admit(self._waiting.popleft())
        request = None if self._pause is PauseScope.ALL else self._next()
        if request is not None:
            self._run(request)
        plan = self._builder.build()
        self._last_step = plan.step_id
        self._out.append((plan.step_id, request))
        return plan

    def update_from_output(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> EngineCoreOutputs:
        """Append the sampled token of the oldest plan to its request. End a finished request."""
        _, request = self._out.popleft()
        self._rows.executed(plan.step_id)
        if request is None or request.status.finished:
            return EngineCoreOutputs()
        name = request.request_id
        prompt_logprobs = _only_entry(output.prompt_logprobs, name)
        if not output.token_ids:
            return EngineCoreOutputs(prompt_logprobs=prompt_logprobs)
        first = not request.num_output_tokens
        request.token_ids.extend(output.token_ids)
        return EngineCoreOutputs(
            request_ids=[name],
            num_new_tokens=array("i", output.num_sampled),
            token_ids=output.token_ids,
            finished=self._finish(request),
            logprobs=_only_entry(output.logprobs, name),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens={name: 0} if first else {},
        )

    def depth(self) -> Depth:
        """Return the counts of requests by state."""
        num_waiting, num_running = len(self._waiting), len(self._running)
        paused = {None: 0, PauseScope.NEW: num_waiting, PauseScope.ALL: num_waiting + num_running}
        return Depth(
            num_waiting=num_waiting, num_running=num_running, num_paused=paused[self._pause]
        )

    def pause(self, scope: PauseScope) -> None:
        """Stop admitting new requests, or stop running all requests, until `resume`."""
        self._pause = scope

    def resume(self) -> None:
        """End a pause."""
        self._pause = None

    def reset_prefix_cache(self) -> bool:
        """Return whether no blocks are in use. There is no prefix cache to reset."""
        return not self._running

    def shutdown(self) -> None:
        """End all requests."""
        self.abort_requests(list(self._requests))

    def _num_blocks(self, request: Request) -> int:
        """Return how many blocks a request needs in total."""
        return sum(self._group_blocks(request))

    def _group_blocks(self, request: Request) -> list[int]:
        """Return how many blocks a request needs in each group. Block sizes may differ."""
        sizes = [group.spec.block_size for group in self._groups]
        return [-(-request.max_total_tokens // size) for size in sizes]

    def _num_blocks_held(self) -> int:
        return sum(len(blocks) for request in self._running for blocks in request.blocks)

    def _can_admit(self, request: Request) -> bool:
        return bool(self._rows.num_free) and self._num_blocks(request) <= len(self._free_blocks)

    def _admit(self, request: Request) -> None:
        request.row, request.generation = self._rows.acquire()
        request.status = RequestStatus.RUNNING
        self._builder.join(NewRequest.of(request))
        request.blocks = []
        for group, num_blocks in enumerate(self._group_blocks(request)):
            # A block belongs to one group at a time.
            blocks = [self._free_blocks.pop() for _ in range(num_blocks)]
            request.blocks.append(blocks)
            self._builder.grow(request.row, blocks, group=group)
        self._running.append(request)

    def _next(self) -> Request | None:
        """Return the next request with a token to run, or None. Move it to the end of the queue."""
        for _ in range(len(self._running)):
            request = self._running[0]
            self._running.rotate(-1)
            # If the last token of a request is pending, there is nothing to run.
            if request.num_tokens_with_pending < request.max_total_tokens:
                return request
        return None

    def _run(self, request: Request) -> None:
        limits, start = self._limits, request.num_computed_tokens
        num_uncomputed = request.num_tokens_with_pending - start
        maximum = limits.max_num_batched_tokens
        if num_uncomputed > 1 and limits.enable_chunked_prefill:
            maximum = min(maximum, limits.long_prefill_token_threshold or maximum)
        num_tokens = min(num_uncomputed, maximum)
        self._builder.run(request.row, start, num_tokens, samples=num_tokens == num_uncomputed)
        request.num_computed_tokens += num_tokens
        request.num_tokens_with_pending += num_tokens == num_uncomputed

    def _finish(self, request: Request) -> tuple[Finished, ...]:
        """Return the `Finished` of `request` if its last token ends it, else None."""
        token, params = request.token_ids[-1], request.sampling_params
        stop_token = None
        if token in request.stop_token_ids and request.num_output_tokens >= params.min_tokens:
            self._end(request, RequestStatus.FINISHED_STOPPED)
            stop_token = token if token in (params.stop_token_ids or ()) else None
        elif request.num_tokens >= request.max_total_tokens:
            self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        else:
            return ()
        reason = FINISH_REASONS[request.status]
        return (Finished(request_id=request.request_id, reason=reason, stop_reason=stop_token),)

    def _end(self, request: Request, status: RequestStatus) -> None:
        del self._requests[request.request_id]
        request.status = status
        if request.row < 0:
            self._waiting.remove(request)
            return
        self._running.remove(request)
        for blocks in request.blocks:
            self._free_blocks += blocks
        self._builder.leave(request.row)
        self._rows.release(request.row, last_step=self._last_step)
        request.row = -1


def _only_entry(columns: Mapping[int, LogprobColumns], name: str) -> dict[str, LogprobColumns]:
    """Return the entry of the only scheduled request, because a plan has only one."""
    return {name: columns[0]} if 0 in columns else {}

"""What a step's result means for the requests that ran: tokens, ends, log-probabilities.

Appends tokens to requests and finds out who has ended; gives up nothing itself: rows and blocks
are the scheduler's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished, SchedulerStats
from dovetail.plan import SchedulerOutput
from dovetail.request import FINISH_REASONS, Request, RequestStatus
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.scheduling.decode_batch import DecodeStepRecord
from dovetail.scheduling.draft import StepRecord

_FINISHED = RequestStatus.FINISHED_STOPPED
"""The first of the final statuses."""


@dataclass(slots=True)
class StepResult:
    """The result of one step, sorted by what it means.

    advanced, request_ids, counts, token_ids: who got tokens, how many, and all of them one after
    the other.
    ended: requests that are done, and why. num_kept: run to how many of its tokens count, where
    that is not all of them.
    """

    advanced: list[Request] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("i"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    ended: list[tuple[Request, RequestStatus]] = field(default_factory=list)
    logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    num_kept: dict[int, int] = field(default_factory=dict)

    def outputs(self, stats: SchedulerStats, failed: Iterable[Finished] = ()) -> EngineCoreOutputs:
        """Return it in the form in which the requests' owners get it.

        failed: requests that have ended without a token of this step.
        """
        finished = tuple(
            Finished(
                request_id=request.request_id,
                reason=FINISH_REASONS[status],
                stop_reason=request.stop_reason,
            )
            for request, status in self.ended
        )
        return EngineCoreOutputs(
            request_ids=self.request_ids,
            num_new_tokens=self.counts,
            token_ids=self.token_ids,
            finished=(*finished, *failed),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            stats=stats,
        )


def settle(record: StepRecord, plan: SchedulerOutput, output: ModelRunnerOutput) -> StepResult:
    """Append the sampled tokens to their requests and tell who has ended.

    record: who runs in the plan. Results of requests that have ended since the plan was made are
    dropped, and so is what was sampled past an end.
    """
    step_result = StepResult()
    num_members = 0
    if record.decode_record is not None:
        num_members = len(record.decode_record.members)
        _process_decode_batch(step_result, record.decode_record, output.token_ids[:num_members])
    if record.counts:
        _process_runs(step_result, [*record.counts], output, num_members)
    if output.logprobs:
        _sort_logprobs(record, output, step_result)
    if output.prompt_logprobs:
        _sort_prompt_logprobs(record, plan, output, step_result)
    return step_result


def _process_decode_batch(
    step_result: StepResult, decode_record: DecodeStepRecord, token_ids: array[int]
) -> None:
    """Settle a token each for those that decode side by side."""
    members, request_ids, own_ids = (
        decode_record.members,
        decode_record.request_ids,
        decode_record.token_ids,
    )
    if decode_record.gone:
        kept = [place for place in range(len(members)) if place not in decode_record.gone]
        members = [members[place] for place in kept]
        request_ids = [request_ids[place] for place in kept]
        own_ids = [own_ids[place] for place in kept]
        token_ids = array("i", [token_ids[place] for place in kept])
    deque(map(array.append, own_ids, token_ids), maxlen=0)
    step_result.advanced += members
    step_result.request_ids += request_ids
    step_result.counts.extend(array("i", (1,)) * len(members))
    step_result.token_ids.extend(token_ids)
    stop_ids, ended = decode_record.stop_ids, step_result.ended
    if not stop_ids.isdisjoint(token_ids):
        for request, token in zip(members, token_ids, strict=True):
            if token in request.stop_token_ids and _may_stop(request):
                ended.append((request, _stop(request, token)))
    if decode_record.capped:
        stopped = {request for request, _ in ended} | set(decode_record.gone.values())
        for request in decode_record.capped:
            if request.status < _FINISHED and request not in stopped:
                ended.append((request, RequestStatus.FINISHED_LENGTH_CAPPED))
        ended.sort(key=lambda end: end[0].admission)


def _process_runs(
    step_result: StepResult, requests: Sequence[Request], output: ModelRunnerOutput, first_run: int
) -> None:
    """Settle the runs from `first_run` on one by one: any number of tokens each.

    Each run before `first_run` has sampled one token.
    """
    advanced, counts, kept = step_result.advanced, step_result.counts, step_result.token_ids
    num_sampled, sampled = output.num_sampled[first_run:], output.token_ids
    position = first_run
    for run, (request, count) in enumerate(zip(requests, num_sampled, strict=True), first_run):
        first, position = position, position + count
        if not count or request.status >= _FINISHED:
            continue
        known = request.token_ids
        if len(known) == request.num_prompt_tokens:
            step_result.num_cached_tokens[request.request_id] = request.num_cached_tokens
        num_kept = 0
        for token in sampled[first:position]:
            num_kept += 1
            known.append(token)
            kept.append(token)
            if token in request.stop_token_ids and _may_stop(request):
                step_result.ended.append((request, _stop(request, token)))
                break
            if len(known) >= request.max_total_tokens:
                step_result.ended.append((request, RequestStatus.FINISHED_LENGTH_CAPPED))
                break
        if num_kept < count:
            step_result.num_kept[run] = num_kept
        advanced.append(request)
        step_result.request_ids.append(request.request_id)
        counts.append(num_kept)


def _may_stop(request: Request) -> bool:
    return request.num_output_tokens >= request.sampling_params.min_tokens


def _stop(request: Request, token: int) -> RequestStatus:
    if token in (request.sampling_params.stop_token_ids or ()):
        request.stop_reason = token
    return RequestStatus.FINISHED_STOPPED


def _sort_logprobs(record: StepRecord, output: ModelRunnerOutput, step_result: StepResult) -> None:
    """Keep the log-probabilities of sampled tokens by request id, for requests that go on."""
    decode_record, kept, num_members = record.decode_record, step_result.logprobs, 0
    if decode_record is not None:
        num_members, names, gone = (
            len(decode_record.members),
            decode_record.request_ids,
            decode_record.gone,
        )
        for run, columns in output.logprobs.items():
            if run < num_members and run not in gone:
                kept[names[run]] = columns
    if not record.counts:
        return
    requests = [*record.counts]
    for run, columns in output.logprobs.items():
        if run >= num_members and (request := requests[run - num_members]).status < _FINISHED:
            num_kept = step_result.num_kept.get(run)
            if num_kept is not None:
                columns = columns.first(num_kept)
            kept[request.request_id] = columns


def _sort_prompt_logprobs(
    record: StepRecord, plan: SchedulerOutput, output: ModelRunnerOutput, step_result: StepResult
) -> None:
    """Keep the log-probabilities of prompt tokens that have not been handed out before."""
    requests = record.requests
    for run, columns in output.prompt_logprobs.items():
        request = requests[run]
        known = request.num_prompt_logprobs - plan.starts[run]  # again, after a preemption
        fresh = columns.after(known) if known > 0 else columns
        if request.status < _FINISHED and fresh.counts:
            request.num_prompt_logprobs += len(fresh.counts)
            step_result.prompt_logprobs[request.request_id] = fresh

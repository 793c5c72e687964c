"""Processes the result of a step for the requests that ran in it.

It appends the sampled tokens to the requests, finds requests that have ended, and collects
log-probabilities. The scheduler then frees the batch slots and blocks of ended requests.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished, SchedulerStats
from dovetail.plan import SchedulerOutput
from dovetail.request import FINISH_REASONS, Request, RequestStatus
from dovetail.result import LogprobColumns, ModelRunnerOutput, PooledTensor
from dovetail.scheduling.decode_batch import ADMISSION, DecodeStepRecord
from dovetail.scheduling.draft import StepRecord

_FINISHED = RequestStatus.FINISHED_STOPPED
"""The first final status; all later statuses are final too."""


@dataclass(slots=True)
class StepResult:
    """The result of one step.

    advanced, request_ids, counts, token_ids: the requests that got tokens, their ids, the numbers
    of tokens, and all tokens concatenated. ended: requests that have ended and why, in plan order.
    num_kept: maps a position in the plan to the number of kept tokens, if some are dropped.
    num_drafts, num_accepted: numbers of verified and accepted drafts.
    """

    advanced: list[Request] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("i"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    ended: list[tuple[Request, RequestStatus]] = field(default_factory=list)
    logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    admitted_ns: dict[str, int] = field(default_factory=dict)
    pooled: dict[str, PooledTensor] = field(default_factory=dict)
    num_kept: dict[int, int] = field(default_factory=dict)
    num_drafts: int = 0
    num_accepted: int = 0

    def outputs(self, stats: SchedulerStats, failed: Iterable[Finished] = ()) -> EngineCoreOutputs:
        """Return the outputs of the step, as the engine core sends them to front ends.

        failed: requests that ended without a token in this step.
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
            admitted_ns=self.admitted_ns,
            pooled=self.pooled,
            stats=stats,
        )


def process_result(
    record: StepRecord, plan: SchedulerOutput, output: ModelRunnerOutput
) -> StepResult:
    """Append the sampled tokens to their requests and find the ended requests, in plan order.

    record: the requests of the plan. Results of requests that ended since the plan was made are
    dropped, as are tokens that were sampled after a request's last token. The decode batch is
    processed as columns, other requests one by one; the same rules decide when they end.
    """
    step_result = StepResult()
    num_members = 0
    if record.decode_record is not None:
        num_members = len(record.decode_record.members)
        process_decode_batch(step_result, record.decode_record, output.token_ids[:num_members])
    position = num_members
    for run, request in enumerate(record.counts, num_members):
        count = output.num_sampled[run]
        if count:
            tokens = output.token_ids[position : position + count]
            position += count
            if plan.num_drafts:
                _count_drafts(step_result, request, plan.num_drafts[run], count)
            if request.status < _FINISHED:
                _process_run(step_result, run, request, tokens)
            if output.num_drafts:
                request.num_drafts = output.num_drafts[run] if request.row >= 0 else 0
    if output.pooled:
        _process_pooled(record, output, step_result)
    if output.logprobs:
        _sort_logprobs(record, output, step_result)
    if output.prompt_logprobs:
        _sort_prompt_logprobs(record, plan, output, step_result)
    return step_result


def process_decode_batch(
    step_result: StepResult, decode_record: DecodeStepRecord, token_ids: array[int]
) -> None:
    """Process one token for each member of the decode batch."""
    members, request_ids, own_ids = (
        decode_record.members,
        decode_record.request_ids,
        decode_record.token_ids,
    )
    if decode_record.gone:
        members, request_ids, own_ids = members[:], request_ids[:], own_ids[:]
        token_ids = token_ids[:]
        for index in sorted(decode_record.gone, reverse=True):
            for column in (members, request_ids, own_ids, token_ids):
                del column[index]
    deque(map(array.append, own_ids, token_ids), maxlen=0)
    step_result.advanced += members
    step_result.request_ids += request_ids
    step_result.counts.extend(array("i", (1,)) * len(members))
    step_result.token_ids.extend(token_ids)
    ending: set[Request] = set()
    if decode_record.capped:
        ending.update(set(decode_record.capped).difference(decode_record.gone.values()))
    if not decode_record.stop_ids.isdisjoint(token_ids):
        stop_ids = decode_record.stop_ids
        ending.update(
            request
            for request, token in zip(members, token_ids, strict=True)
            if token in stop_ids and token in request.stop_token_ids
        )
    for request in sorted(ending, key=ADMISSION) if ending else ():
        if request.status < _FINISHED and (status := _final_status(request)) is not None:
            step_result.ended.append((request, status))


def _process_run(
    step_result: StepResult, run: int, request: Request, token_ids: Sequence[int]
) -> None:
    """Process any number of sampled tokens of one request. run: its position in the plan."""
    known = request.token_ids
    if len(known) == request.num_prompt_tokens:
        step_result.num_cached_tokens[request.request_id] = request.num_cached_tokens
        step_result.admitted_ns[request.request_id] = request.admitted_ns
    num_kept = 0
    for token in token_ids:
        num_kept += 1
        known.append(token)
        if (status := _final_status(request)) is not None:
            step_result.ended.append((request, status))
            break
    if num_kept < len(token_ids):
        step_result.num_kept[run] = num_kept
    step_result.advanced.append(request)
    step_result.request_ids.append(request.request_id)
    step_result.counts.append(num_kept)
    step_result.token_ids.extend(known[-num_kept:])


def _process_pooled(record: StepRecord, output: ModelRunnerOutput, step_result: StepResult) -> None:
    """End the requests whose pooled results are in `output`."""
    requests = record.requests
    for run, pooled in sorted(output.pooled.items()):
        request = requests[run]
        if request.status >= _FINISHED or request.pooling_params is None:
            continue
        name = request.request_id
        step_result.pooled[name] = pooled
        step_result.num_cached_tokens[name] = request.num_cached_tokens
        step_result.admitted_ns[name] = request.admitted_ns
        step_result.ended.append((request, RequestStatus.FINISHED_STOPPED))


def _count_drafts(
    step_result: StepResult, request: Request, num_planned: int, num_sampled: int
) -> None:
    """Count the verified and accepted draft tokens of one request in a step.

    num_planned: maximum number of draft tokens in the plan; the worker may have held fewer.
    """
    step_result.num_drafts += min(num_planned, request.num_drafts)
    step_result.num_accepted += num_sampled - 1
    request.take_back(1 + num_planned - num_sampled)


def _final_status(request: Request) -> RequestStatus | None:
    """Return the final status that the last token of `request` causes, or None."""
    token = request.token_ids[-1]
    if token in request.stop_token_ids:
        params = request.sampling_params
        if request.num_output_tokens >= params.min_tokens:
            if token in (params.stop_token_ids or ()):
                request.stop_reason = token
            return RequestStatus.FINISHED_STOPPED
    if len(request.token_ids) >= request.max_total_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None


def _sort_logprobs(record: StepRecord, output: ModelRunnerOutput, step_result: StepResult) -> None:
    """Collect the log-probabilities of sampled tokens by request id, for unfinished requests."""
    decode_record, kept, num_members = record.decode_record, step_result.logprobs, 0
    if decode_record is not None:
        num_members, names, left_indexes = (
            len(decode_record.members),
            decode_record.request_ids,
            decode_record.gone,
        )
        for run, columns in output.logprobs.items():
            if run < num_members and run not in left_indexes:
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
    """Collect the log-probabilities of prompt tokens by request id, each token only once.

    Tokens that are recomputed after a preemption are omitted.
    """
    requests = record.requests
    for run, columns in output.prompt_logprobs.items():
        request = requests[run]
        # The number of tokens that are recomputed after a preemption.
        known = request.num_prompt_logprobs - plan.starts[run]
        fresh = columns.after(known) if known > 0 else columns
        if request.status < _FINISHED and fresh.counts:
            request.num_prompt_logprobs += len(fresh.counts)
            step_result.prompt_logprobs[request.request_id] = fresh

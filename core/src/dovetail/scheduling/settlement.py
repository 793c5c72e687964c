"""What a step's result means for the requests that ran: tokens, ends, log-probabilities.

Appends tokens to requests and finds out who has ended; gives up nothing itself: rows and blocks
are the scheduler's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from dovetail.interfaces.scheduler import EngineCoreOutputs, Finished, SchedulerStats
from dovetail.plan import SchedulerOutput
from dovetail.request import FINISH_REASONS, Request, RequestStatus
from dovetail.result import LogprobColumns, ModelRunnerOutput

_FINISHED = RequestStatus.FINISHED_STOPPED
"""The first of the final statuses."""


@dataclass(slots=True)
class Settlement:
    """The result of one step, sorted by what it means.

    advanced, counts, token_ids: who got tokens, how many, and all of them one after the other.
    ended: requests that are done, and why.
    """

    advanced: list[Request] = field(default_factory=list)
    counts: array[int] = field(default_factory=lambda: array("i"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    ended: list[tuple[Request, RequestStatus]] = field(default_factory=list)
    logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobColumns] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)

    def outputs(self, stats: SchedulerStats) -> EngineCoreOutputs:
        """Return it in the form in which the requests' owners get it."""
        finished = tuple(
            Finished(
                request_id=request.request_id,
                reason=FINISH_REASONS[status],
                stop_reason=request.stop_reason,
            )
            for request, status in self.ended
        )
        return EngineCoreOutputs(
            request_ids=[request.request_id for request in self.advanced],
            num_new_tokens=self.counts,
            token_ids=self.token_ids,
            finished=finished,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            stats=stats,
        )


def settle(
    requests: Sequence[Request], plan: SchedulerOutput, output: ModelRunnerOutput
) -> Settlement:
    """Append the sampled tokens to their requests and tell who has ended.

    requests: those of the plan's runs, in plan order. Results of requests that have ended since the
    plan was made are dropped, and so is what was sampled past an end.
    """
    settlement = Settlement()
    sampled = output.token_ids
    advanced, counts, kept = settlement.advanced, settlement.counts, settlement.token_ids
    position = 0
    for request, count in zip(requests, output.num_sampled, strict=True):
        first, position = position, position + count
        if not count or request.status >= _FINISHED:
            continue
        known = request.token_ids
        if len(known) == request.num_prompt_tokens:
            settlement.num_cached_tokens[request.request_id] = request.num_cached_tokens
        num_kept = 0
        for token in sampled[first:position]:
            num_kept += 1
            known.append(token)
            kept.append(token)
            if token in request.stop_token_ids and _may_stop(request):
                settlement.ended.append((request, _stop(request, token)))
                break
            if len(known) >= request.max_total_tokens:
                settlement.ended.append((request, RequestStatus.FINISHED_LENGTH_CAPPED))
                break
        advanced.append(request)
        counts.append(num_kept)
    _sort_logprobs(requests, plan, output, settlement)
    return settlement


def _may_stop(request: Request) -> bool:
    return request.num_output_tokens >= request.sampling_params.min_tokens


def _stop(request: Request, token: int) -> RequestStatus:
    if token in (request.sampling_params.stop_token_ids or ()):
        request.stop_reason = token
    return RequestStatus.FINISHED_STOPPED


def _sort_logprobs(
    requests: Sequence[Request],
    plan: SchedulerOutput,
    output: ModelRunnerOutput,
    settlement: Settlement,
) -> None:
    for run, columns in output.logprobs.items():
        if requests[run].status < _FINISHED:
            settlement.logprobs[requests[run].request_id] = columns
    for run, columns in output.prompt_logprobs.items():
        request = requests[run]
        known = request.num_prompt_logprobs - plan.starts[run]  # again, after a preemption
        fresh = columns.after(known) if known > 0 else columns
        if request.status < _FINISHED and fresh.counts:
            request.num_prompt_logprobs += len(fresh.counts)
            settlement.prompt_logprobs[request.request_id] = fresh

"""The plan of a step while it is being built: the grants, which can be revoked.

Planning changes only the blocks of a request. The token counts change when the plan is emitted, so
revoking the grant of an evicted request is one deletion.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.request import EngineCoreRequest, Request, RequestStatus
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling.decode_batch import DecodeBatch, DecodeStepRecord
from dovetail.scheduling.encoder_budget import EncoderBudget
from dovetail.scheduling.life_cycle import change_status


def _ended_request() -> Request:
    """Return an ended placeholder request, whose results are dropped."""
    dropped = EngineCoreRequest(
        request_id="", prompt_token_ids=(), sampling_params=SamplingParams(), max_tokens=1
    )
    request = Request(dropped, max_model_len=1)
    change_status(request, RequestStatus.FINISHED_ABORTED)
    return request


@dataclass(slots=True)
class StepRecord:
    """The requests of an emitted plan.

    together: members of the decode batch, which come first in the plan. counts: other requests and
    their numbers of tokens, in plan order. schedule_ns: the time that planning took.
    """

    decode_record: DecodeStepRecord | None
    counts: dict[Request, int]
    schedule_ns: int = 0

    @property
    def requests(self) -> list[Request]:
        """All requests, in plan order. Dropped requests are replaced by ended placeholders."""
        members = self.decode_record.members if self.decode_record else []
        left_indexes = self.decode_record.gone if self.decode_record else ()
        for index in left_indexes:
            members = [*members[:index], _ended_request(), *members[index + 1 :]]
        return [*members, *self.counts]

    def void(self, request: Request) -> None:
        """Drop the step's result for `request`, which has not ended."""
        self.drop(request)
        if request in self.counts:
            grants = [
                (_ended_request() if item is request else item, n)
                for item, n in self.counts.items()
            ]
            self.counts.clear()
            self.counts.update(grants)

    def drop(self, request: Request) -> None:
        """Drop the step's result for `request`, which has ended."""
        if self.decode_record is not None and (index := self.decode_record.place(request)) >= 0:
            self.decode_record.gone[index] = request

    @property
    def grants(self) -> Iterator[tuple[Request, int]]:
        """All requests with their numbers of tokens, in plan order."""
        members = self.decode_record.members if self.decode_record else ()
        return chain(((request, 1) for request in members), self.counts.items())


class StepDraft:
    """Grants of one step, in plan order.

    decode_batch: the batch whose members run one token each, before other requests; None if it does
    not run. counts: other requests that run and their numbers of tokens. held: requests that the
    policy pauses in this step. computing: requests by the key of the first block that each of them
    computes from known tokens.
    num_blocks_hashed: blocks of waiting prompts whose hashes were computed in this step.
    joined: requests that this step admits. evicted: requests that this step preempts.
    tokens_left: remaining token budget of the step.
    """

    def __init__(self, max_num_batched_tokens: int, encoder: EncoderBudget) -> None:
        self._encoder = encoder
        self.tokens_left = max_num_batched_tokens
        self.counts: dict[Request, int] = {}
        self.computing: dict[bytes, Request] = {}
        self.num_blocks_hashed = 0
        self.held: set[Request] = set()
        self.joined: dict[Request, None] = {}
        self.evicted: set[Request] = set()
        self.decode_batch: DecodeBatch | None = None
        self._grown: dict[Request, list[list[list[int]]]] = {}
        self._next_blocks: dict[Request, int] = {}

    def grant(self, request: Request, num_tokens: int) -> None:
        """Let `request`, which has no grant yet, compute `num_tokens` tokens in this step."""
        self.counts[request] = num_tokens
        self.tokens_left -= num_tokens
        start = request.num_computed_tokens
        if start < request.encoder_end:
            self._encoder.want(request, start, start + num_tokens)

    def continue_decode_batch(self, decode_batch: DecodeBatch) -> None:
        """Let each member of `decode_batch` compute one token, before other requests."""
        self.decode_batch = decode_batch
        self.tokens_left -= len(decode_batch)

    def move_back(self, requests: Iterable[Request]) -> None:
        """Move the grants of `requests` behind all other grants."""
        for request in requests:
            if request in self.counts:
                self.counts[request] = self.counts.pop(request)

    def take_lost_tokens(self) -> int:
        """Return how many tokens the requests admitted after a preemption must compute again."""
        total = 0
        for request in self.joined:
            lost, request.num_lost_tokens = request.num_lost_tokens, 0
            total += max(0, lost - request.num_computed_tokens)
        return total

    @property
    def empty(self) -> bool:
        """Whether no request runs in this step."""
        return not self.counts and not self.decode_batch

    def has_grant(self, request: Request) -> bool:
        """Return whether `request` runs in this step."""
        return request in self.counts or (
            self.decode_batch is not None and request in self.decode_batch
        )

    def join(self, request: Request) -> None:
        """Record that this step admits `request`: it gets a batch slot and blocks."""
        self.joined[request] = None

    def grow(self, request: Request, blocks: list[list[int]]) -> None:
        """Record the new blocks of a running request, one list for each KV-cache group."""
        if request not in self.joined:  # the join of a request contains all its blocks
            self._grown.setdefault(request, []).append(blocks)

    def grow_each(self, requests: Iterable[Request], blocks: Iterable[int]) -> None:
        """Record one new block for each request of a model with one KV-cache group."""
        self._next_blocks.update(zip(requests, blocks, strict=True))

    def revoke(self, request: Request) -> bool:
        """Revoke the grants of `request` in this step. Return whether this step had admitted it."""
        if self.decode_batch is not None and request in self.decode_batch:
            self.tokens_left += 1
        self.tokens_left += self.counts.pop(request, 0)
        self._encoder.revoke(request)
        self.held.discard(request)
        self.evicted.add(request)
        self._grown.pop(request, None)
        self._next_blocks.pop(request, None)
        return request in self.joined and self.joined.pop(request) is None

    def emit(self, builder: StepBuilder) -> tuple[SchedulerOutput, StepRecord]:
        """Build the plan and advance the granted requests to their state after the step."""
        self._emit_rows(builder)
        self._encoder.emit(builder)
        decode_record = None
        if self.decode_batch is not None:
            decode_record = self.decode_batch.take_step()
            builder.run_decodes(decode_record.rows, decode_record.starts)
        if self.counts:
            self._emit_runs(builder)
        return builder.build(), StepRecord(decode_record, self.counts)

    def _emit_rows(self, builder: StepBuilder) -> None:
        for request in self.joined:
            builder.join(NewRequest.of(request))
            for group, ids in enumerate(request.blocks):
                builder.grow(request.row, ids, group=group)
        if self._next_blocks:
            builder.grow_each(
                [next_block.row for next_block in self._next_blocks], self._next_blocks.values()
            )
        for request, grown in self._grown.items():
            for blocks in grown:
                for group, ids in enumerate(blocks):
                    builder.grow(request.row, ids, group=group)

    def _emit_runs(self, builder: StepBuilder) -> None:
        starts, samples, num_drafts = array("i"), array("B"), array("i")
        for request, count in self.counts.items():
            start = request.num_computed_tokens
            end, known = start + count, request.num_tokens_with_pending
            starts.append(start)
            samples.append(end >= known)
            num_drafts.append(max(0, end - known))
            request.num_computed_tokens = end
            if end >= known:
                request.num_tokens_with_pending = end + 1
        rows = [request.row for request in self.counts]
        drafts = num_drafts if any(num_drafts) else ()
        builder.run_many(rows, starts, self.counts.values(), samples, drafts)

"""The plan of one step, which the scheduler sends to the executor, as columns.

A plan has one entry for each scheduled request: its batch slot (`row`), the first position and the
number of tokens. Prefills, chunks, decodes and the verification of drafts have the same form. Only
new requests are described by objects. A plan is immutable. It contains no tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dovetail.pooling_params import PoolingParams
from dovetail.request import EncoderInput, Request
from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request that gets a batch slot with this plan, until it ends or is preempted.

    row, generation: the batch slot, and how many requests have had it before. A worker may assert
    that the generation of a batch slot only increases.
    token_ids: int32, all known tokens: the prompt, then the tokens generated before a preemption.
    The other fields are those of `EngineCoreRequest`.
    """

    request_id: str
    row: int
    generation: int
    token_ids: array[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    seed: int
    encoder_inputs: tuple[EncoderInput, ...] = ()
    pooling_params: PoolingParams | None = None

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        """Return the part of `request` for the worker. `row` must be set. Copies the tokens."""
        return cls(
            request_id=request.request_id,
            row=request.row,
            generation=request.generation,
            token_ids=request.token_ids[:],
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            seed=request.seed,
            encoder_inputs=request.encoder_inputs,
            pooling_params=request.pooling_params,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """Blocks to append to the block tables of requests, for one KV-cache group.

    rows[i] gets the next counts[i] ids of `block_ids`. All typecodes are "i" (int32). A batch slot
    may occur more than once; its ids are appended in order.
    """

    rows: array[int]
    counts: array[int]
    block_ids: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderRun:
    """Multimodal content to encode in a step: `encoder_inputs[index]` of the request in `row`."""

    row: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step: columns with one entry for each scheduled request, in plan order.

    step_id: increases by one with each plan of a scheduler.
    rows, starts, num_tokens: int32; the step computes tokens [start, start + n) of the request in
    this batch slot.
    samples: uint8; 1 if these tokens include the last known token, so that the step samples the
        next one, or returns the pooled result of a request with `pooling_params`.
    joins: new and resumed requests, which get a batch slot with this plan.
    leaves: int32; batch slots released since the last plan. A worker applies leaves, joins, blocks,
        encoder_frees and encoder in this order, and then computes the tokens.
    blocks: one entry per KV-cache group.
    num_drafts: int32; how many of a request's last tokens in this step are drafts to verify. They
        are the first drafts that the worker holds for the request; it may hold fewer. The step
        samples for such a request. Empty if no request has drafts.
    encoder: content to encode in this step; each hash once, and only if its output is not cached.
    encoder_frees: hashes of content whose encoder output is dropped.
    kv_transfer: message of the KV connector's scheduler side to its worker side; empty for none.
    """

    step_id: int
    rows: array[int]
    starts: array[int]
    num_tokens: array[int]
    samples: array[int]
    joins: tuple[NewRequest, ...]
    leaves: array[int]
    blocks: tuple[BlockColumns, ...]
    total_num_tokens: int
    num_drafts: array[int] = field(default_factory=lambda: array("i"))
    encoder: tuple[EncoderRun, ...] = ()
    encoder_frees: tuple[bytes, ...] = ()
    kv_transfer: bytes = b""

    @property
    def num_requests(self) -> int:
        """Number of requests in the batch."""
        return len(self.rows)

    @property
    def empty(self) -> bool:
        """Whether the plan computes no tokens.

        It may still release batch slots or contain transfers.
        """
        return not self.rows

    def describe(self) -> str:
        """Return a summary without tokens, for error messages."""
        head = (
            f"step {self.step_id}: {len(self.rows)} scheduled requests with "
            f"{self.total_num_tokens} tokens, "
        )
        tail = f"{len(self.joins)} new requests, {len(self.leaves)} released batch slots"
        runs = list(zip(self.rows, self.starts, self.num_tokens, strict=True))[:16]
        return head + tail + "".join(f"\n  row {r}: positions {s}..{s + n - 1}" for r, s, n in runs)


class StepBuilder:
    """Builds plans. The only way to create a `SchedulerOutput`.

    A scheduler uses one builder, which numbers the plans. Each method adds work to the plan.
    `build` raises ValueError for a plan that no worker can execute, and resets the builder.
    step_id: the number of the plan that is being built.
    """

    def __init__(self, *, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self.step_id = 0
        self._clear()

    def _clear(self) -> None:
        self._rows = array("i")
        self._starts = array("i")
        self._num_tokens = array("i")
        self._samples = array("B")
        self._joins: list[NewRequest] = []
        self._leaves = array("i")
        self._blocks = [(array("i"), array("i"), array("i")) for _ in range(self._num_groups)]
        self._num_decodes = 0
        self._num_drafts = array("i")
        self._encoder: list[EncoderRun] = []
        self._encoder_frees: list[bytes] = []
        self._kv_transfer = b""

    def leave(self, row: int) -> None:
        """Release `row`: its request has finished or is preempted."""
        self._leaves.append(row)

    def join(self, request: NewRequest) -> None:
        """Add a new request, whose batch slot is set."""
        self._joins.append(request)

    def grow(self, row: int, block_ids: Sequence[int], *, group: int = 0) -> None:
        """Append `block_ids` to the block table of the request in `row`, for `group`."""
        if block_ids:
            rows, counts, ids = self._blocks[group]
            rows.append(row)
            counts.append(len(block_ids))
            ids.extend(block_ids)

    def grow_each(self, rows: Sequence[int], block_ids: Iterable[int]) -> None:
        """Append one block to the table of each of `rows`, in the first group."""
        into, counts, ids = self._blocks[0]
        into.extend(rows)
        counts.extend(array("i", (1,)) * len(rows))
        ids.extend(block_ids)

    def encode(self, row: int, index: int) -> None:
        """Encode encoder input `index` of the request in `row` before its tokens are computed."""
        self._encoder.append(EncoderRun(row=row, index=index))

    def free_encoded(self, content_hash: bytes) -> None:
        """Drop the encoder output with this content hash."""
        self._encoder_frees.append(content_hash)

    def transfer(self, kv_transfer: bytes) -> None:
        """Set the message to the KV connector's worker side. A later call replaces it."""
        self._kv_transfer = kv_transfer

    def run(
        self, row: int, start: int, num_tokens: int, *, samples: bool, num_drafts: int = 0
    ) -> None:
        """Compute tokens [start, start + num_tokens) of the request in `row`. Sample if requested.

        num_drafts: how many of the last tokens are drafts to verify.
        """
        if num_drafts:
            self._pad_drafts()
            self._num_drafts.append(num_drafts)
        self._rows.append(row)
        self._starts.append(start)
        self._num_tokens.append(num_tokens)
        self._samples.append(samples)

    def run_many(
        self,
        rows: Iterable[int],
        starts: Iterable[int],
        num_tokens: Iterable[int],
        samples: Iterable[int],
        num_drafts: Iterable[int] = (),
    ) -> None:
        """Add several requests as columns of equal length.

        Without `num_drafts` they have no drafts.
        """
        if num_drafts:
            self._pad_drafts()
            self._num_drafts.extend(num_drafts)
        self._rows.extend(rows)
        self._starts.extend(starts)
        self._num_tokens.extend(num_tokens)
        self._samples.extend(samples)

    def run_decodes(self, rows: array[int], starts: array[int]) -> None:
        """Compute one token of each request in `rows` at its start, and sample after it.

        Call it once, before any other request is added. The batch slots must be distinct, and must
        not occur in other calls for this step. For speed this is not checked.
        """
        self._num_decodes = len(rows)
        self._rows.extend(rows)
        self._starts.extend(starts)
        self._num_tokens.extend(array("i", (1,)) * len(rows))
        self._samples.extend(array("B", (1,)) * len(rows))

    def build(self) -> SchedulerOutput:
        """Return the plan and start the next one.

        Raises ValueError if no worker could execute the plan.
        """
        if self._num_drafts:
            self._pad_drafts()
        self._check()
        plan = SchedulerOutput(
            step_id=self.step_id,
            rows=self._rows,
            starts=self._starts,
            num_tokens=self._num_tokens,
            samples=self._samples,
            joins=tuple(self._joins),
            leaves=self._leaves,
            blocks=tuple(
                BlockColumns(rows=rows, counts=counts, block_ids=ids)
                for rows, counts, ids in self._blocks
            ),
            total_num_tokens=self._num_decodes + sum(self._num_tokens[self._num_decodes :]),
            num_drafts=self._num_drafts,
            encoder=tuple(self._encoder),
            encoder_frees=tuple(self._encoder_frees),
            kv_transfer=self._kv_transfer,
        )
        self.step_id += 1
        self._clear()
        return plan

    def _pad_drafts(self) -> None:
        """Set the number of drafts to 0 for requests that were added without this number."""
        self._num_drafts.extend(bytes(len(self._rows) - len(self._num_drafts)))

    def _check(self) -> None:
        num_runs, first = len(self._rows), self._num_decodes
        if not num_runs == len(self._starts) == len(self._num_tokens) == len(self._samples):
            raise ValueError("a plan's columns must have equal lengths")
        if num_runs > first and (
            min(self._num_tokens[first:]) < 1 or min(self._starts[first:]) < 0
        ):
            raise ValueError("each scheduled request needs a start ≥ 0 and at least one token")
        if len(set(self._rows[first:])) != num_runs - first:
            raise ValueError("a step can contain each row (batch slot) only once")
        if not self._num_drafts:
            return
        runs = zip(self._num_tokens, self._samples, self._num_drafts, strict=True)
        if any(drafts and not (samples and 0 < drafts < count) for count, samples, drafts in runs):
            raise ValueError("a request with drafts must sample, and begin with a known token")

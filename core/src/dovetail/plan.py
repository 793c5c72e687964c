"""The plan of one step: what the scheduler hands to the executor, as columns.

A plan says, for each run, (row, first position, number of tokens): prefill, chunk, decode and
verification of drafts are the same thing. Per-request objects appear only for requests that join.
A plan is immutable once built. Knows nothing of policies, blocks' owners or tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dovetail.request import Request
from dovetail.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request that joins a row with this plan, for life: until it finishes or is preempted.

    row, generation: the row and how many requests have had it before; a worker may assert that
        the generation of a row only grows.
    token_ids: int32, everything known: the prompt, then what was generated before a preemption.
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

    @classmethod
    def of(cls, request: Request) -> NewRequest:
        """Take from `request`, whose row is set, what a worker has to know; copies the tokens."""
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """Blocks appended to rows' block tables, for one KV-cache group.

    rows[i] gets the next counts[i] ids of `block_ids`. Typecode "i" (int32) throughout. A row may
    appear more than once; its ids are appended in order.
    """

    rows: array[int]
    counts: array[int]
    block_ids: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """What is to run in one step. Columns of equal length, one entry a run, in plan order.

    step_id: grows by one with each plan of a scheduler.
    rows, starts, num_tokens: int32; tokens [start, start + n) of the row are brought forward.
    samples: uint8; 1 where the run reaches the last known token: the step samples the next.
    joins: requests that take a row with this plan, each before its first run.
    leaves: int32; rows given up since the last plan. A worker applies leaves, joins, blocks, runs.
    blocks: one entry a KV-cache group.
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

    @property
    def num_requests(self) -> int:
        """Number of runs."""
        return len(self.rows)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to run. Such a plan still carries leaves."""
        return not self.rows

    def describe(self) -> str:
        """Return a digest of shapes, for an error message; never a token."""
        head = f"step {self.step_id}: {len(self.rows)} runs, {self.total_num_tokens} tokens, "
        tail = f"{len(self.joins)} joins, {len(self.leaves)} leaves"
        runs = list(zip(self.rows, self.starts, self.num_tokens, strict=True))[:16]
        return head + tail + "".join(f"\n  row {r}: positions {s}..{s + n - 1}" for r, s, n in runs)


class StepBuilder:
    """Builds plans without knowledge of their columns; the one way to make a `SchedulerOutput`.

    Use one builder for the life of a scheduler: it numbers the plans, and `build` leaves it empty.
    `build` raises ValueError for a plan that no worker could execute.
    """

    def __init__(self, *, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._step_id = 0
        self._clear()

    def _clear(self) -> None:
        self._rows = array("i")
        self._starts = array("i")
        self._num_tokens = array("i")
        self._samples = array("B")
        self._joins: list[NewRequest] = []
        self._leaves = array("i")
        self._blocks = [(array("i"), array("i"), array("i")) for _ in range(self._num_groups)]

    def leave(self, row: int) -> None:
        """Give up `row`: whoever has it has finished or is preempted."""
        self._leaves.append(row)

    def join(self, request: NewRequest) -> None:
        """Let `request` take its row."""
        self._joins.append(request)

    def grow(self, row: int, block_ids: Sequence[int], *, group: int = 0) -> None:
        """Append `block_ids` to the row's block table of `group`."""
        if block_ids:
            rows, counts, ids = self._blocks[group]
            rows.append(row)
            counts.append(len(block_ids))
            ids.extend(block_ids)

    def run(self, row: int, start: int, num_tokens: int, *, samples: bool) -> None:
        """Bring tokens [start, start + num_tokens) of `row` forward; sample after them if asked."""
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
    ) -> None:
        """Do what `run` does, for four columns of equal length at once."""
        self._rows.extend(rows)
        self._starts.extend(starts)
        self._num_tokens.extend(num_tokens)
        self._samples.extend(samples)

    def build(self) -> SchedulerOutput:
        """Return the plan and begin the next; raise ValueError if it could not be executed."""
        self._check()
        plan = SchedulerOutput(
            step_id=self._step_id,
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
            total_num_tokens=sum(self._num_tokens),
        )
        self._step_id += 1
        self._clear()
        return plan

    def _check(self) -> None:
        num_runs = len(self._rows)
        if not num_runs == len(self._starts) == len(self._num_tokens) == len(self._samples):
            raise ValueError("a plan's columns must have equal lengths")
        if num_runs and (min(self._num_tokens) < 1 or min(self._starts) < 0):
            raise ValueError("each run needs a start ≥ 0 and at least one token")
        if len(set(self._rows)) != num_runs:
            raise ValueError("a row may run only once in a step")

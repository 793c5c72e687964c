"""Encodes plans as records of a decision log, each relative to the previous one.

The same plans give the same bytes, so a replay is verified by encoding its plans. A step that only
continues the previous one needs only a few bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from dovetail.decision_log.encoding import Codebook, Plain, pack_columns, unpack_columns
from dovetail.plan import NewRequest, SchedulerOutput

_SAME_ROWS, _NEXT_STARTS, _ALL_ONE, _ALL_SAMPLE = 1, 2, 4, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedJoin:
    """A request that starts to run, and gets a batch slot with this plan.

    token_ids: codes instead of ids.
    """

    request_id: str
    row: int
    generation: int
    num_prompt_tokens: int
    token_ids: array[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPlan:
    """A plan read from a log: columns as in `SchedulerOutput`, int32.

    blocks: rows, counts and block ids of each KV-cache group. encoder: row and input index of each
    scheduled encoder input.
    encoder_frees: codes of the encoder contents to free.
    """

    step_id: int
    rows: array[int]
    starts: array[int]
    num_tokens: array[int]
    samples: array[int]
    leaves: array[int]
    num_drafts: array[int]
    blocks: tuple[tuple[array[int], ...], ...]
    encoder: tuple[tuple[int, ...], ...]
    encoder_frees: tuple[int, ...]
    joins: tuple[LoggedJoin, ...]


class PlanEncoder:
    """Encodes plans to bytes."""

    def __init__(self, tokens: Codebook | Plain, contents: Codebook | None) -> None:
        """Create an encoder. contents: None if the plans have codes instead of encoder contents."""
        self._tokens = tokens
        self._contents = contents
        self._rows = array("i")
        self._starts = array("i")

    def encode(self, plan: SchedulerOutput) -> bytes:
        """Encode a plan. Call it once for each plan, in order."""
        num_runs, flags = len(plan.rows), 0
        columns: list[array[int]] = []
        if plan.rows == self._rows:
            flags |= _SAME_ROWS
        else:
            columns.append(plan.rows)
        if flags and plan.starts == _advanced(self._starts):
            flags |= _NEXT_STARTS
        else:
            columns.append(plan.starts)
        if plan.num_tokens == _ones(num_runs):
            flags |= _ALL_ONE
        else:
            columns.append(plan.num_tokens)
        if bytes(plan.samples).count(1) == num_runs:
            flags |= _ALL_SAMPLE
        else:
            columns.append(array("i", plan.samples))
        self._rows, self._starts = plan.rows, plan.starts
        columns += [plan.leaves, plan.num_drafts]
        for blocks in plan.blocks:
            columns += [blocks.rows, blocks.counts, blocks.block_ids]
        columns += [array("i", (run.row, run.index)) for run in plan.encoder]
        columns.append(array("i", map(self._content, plan.encoder_frees)))
        columns += [column for join in plan.joins for column in self._join(join)]
        header = [
            plan.step_id,
            flags,
            num_runs,
            len(plan.joins),
            len(plan.encoder),
            len(plan.blocks),
        ]
        return pack_columns([array("q", header), *columns])

    def _join(self, join: NewRequest) -> tuple[array[int], ...]:
        name = array("B", join.request_id.encode(errors="surrogatepass"))
        numbers = array("q", (join.row, join.generation, join.num_prompt_tokens))
        return name, numbers, self._tokens.codes(join.token_ids)

    def _content(self, name: bytes) -> int:
        return int(name) if self._contents is None else self._contents.code(name)


class PlanDecoder:
    """Decodes the payloads of PLAN records, in order."""

    def __init__(self) -> None:
        self._rows = array("i")
        self._starts = array("i")

    def decode(self, payload: bytes) -> LoggedPlan:
        """Return the next plan."""
        columns = iter(unpack_columns(payload))
        step_id, flags, num_runs, num_joins, num_encoder, num_groups = next(columns)
        rows = self._rows if flags & _SAME_ROWS else next(columns)
        starts = _advanced(self._starts) if flags & _NEXT_STARTS else next(columns)
        num_tokens = _ones(num_runs) if flags & _ALL_ONE else next(columns)
        samples = _ones(num_runs) if flags & _ALL_SAMPLE else next(columns)
        self._rows, self._starts = rows, starts
        leaves, num_drafts = next(columns), next(columns)
        groups = [(next(columns), next(columns), next(columns)) for _ in range(num_groups)]
        encoder = [tuple(next(columns)) for _ in range(num_encoder)]
        frees = tuple(next(columns))
        joins = []
        for _ in range(num_joins):
            name, (row, generation, num_prompt) = next(columns), next(columns)
            join = LoggedJoin(
                request_id=bytes(name).decode(errors="surrogatepass"),
                row=row,
                generation=generation,
                num_prompt_tokens=num_prompt,
                token_ids=next(columns),
            )
            joins.append(join)
        return LoggedPlan(
            step_id=step_id,
            rows=rows,
            starts=starts,
            num_tokens=num_tokens,
            samples=samples,
            leaves=leaves,
            num_drafts=num_drafts,
            blocks=tuple(groups),
            encoder=tuple(encoder),
            encoder_frees=frees,
            joins=tuple(joins),
        )


def _advanced(starts: array[int]) -> array[int]:
    return array("i", [start + 1 for start in starts])


def _ones(count: int) -> array[int]:
    return array("i", (1,)) * count

"""What a worker's rows must be like: an exact model of rows, blocks and what attention reads.

The "key and value" of a position is a number that stands for every token up to it; it is kept by
block and offset, so that a stale, foreign or aliased block gives another number than the right one.
A sampled token is computed from all numbers that attention would read, and from nothing else. A
strict model also raises AssertionError for each law of `WorkerBase` and of the plan that is broken.
Knows no scheduler and no tensors. A test may replace a method to make a model that is wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import BlockColumns, NewRequest, SchedulerOutput
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.testing.expectation import expect

_MASK = (1 << 64) - 1
_UNDEFINED = 0x0BAD_0BAD_0BAD_0BAD
"""What a slot holds that nobody has written."""


def mix(left: int, right: int) -> int:
    """Return a number of 64 bits that depends on both; the finaliser of SplitMix64.

    Source: Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195.
    """
    mixed = (left * 0x9E3779B97F4A7C15 + right + 1) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def predict_token(token_ids: Sequence[int], seed: int, vocab_size: int) -> int:
    """Return the token that a right worker samples after `token_ids`, whatever else runs."""
    content, attended = 0, 0
    for token in token_ids:
        content = mix(content, token)
        attended += content
    return mix(attended & _MASK, seed) % vocab_size


@dataclass(slots=True, kw_only=True)
class RowState:
    """One row: whose it is, its tokens, its blocks by group, and how far it is computed.

    contents: what the slot of each known position must hold. num_computed: -1 before the first run.
    """

    request: NewRequest
    tokens: list[int]
    contents: list[int]
    blocks: list[list[int]]
    num_computed: int = -1

    def append(self, token: int) -> None:
        """Add a token."""
        self.contents.append(mix(self.contents[-1] if self.contents else 0, token))
        self.tokens.append(token)


@dataclass(slots=True)
class _Step:
    """A plan that was executed, and what each run's attention has read."""

    plan: SchedulerOutput
    attended: list[int] = field(default_factory=list)


class RowModel:
    """Executes plans on rows of numbers.

    strict: whether broken laws raise; a lenient model only computes what follows from them.
    rows: the rows that are held, by number. Read it; only the model writes to it.
    """

    strict: ClassVar[bool] = True

    def __init__(self, limits: SchedulerLimits, kv_cache: KVCacheConfig, vocab_size: int) -> None:
        self.limits = limits
        self.vocab_size = vocab_size
        self.rows: dict[int, RowState] = {}
        self._kv_cache = kv_cache
        self._block_sizes = [group.spec.block_size for group in kv_cache.groups]
        self._cached = [bool(group.bytes_per_block) for group in kv_cache.groups]
        self._slots: dict[tuple[int, int, int], int] = {}
        self._generations: dict[int, int] = {}
        self._last_step = -1
        self._step: _Step | None = None

    def execute(self, plan: SchedulerOutput) -> None:
        """Apply leaves, joins, blocks and runs, in that order; keep what `sample` needs."""
        self._require(self._step is None, "the plan before was not sampled for")
        self._require(
            plan.step_id > self._last_step,
            f"step {plan.step_id} comes after step {self._last_step}: plans are out of order",
        )
        self._last_step = plan.step_id
        for row in plan.leaves:
            self.leave(row)
        for request in plan.joins:
            self.join(request)
        self._require(len(plan.blocks) == len(self._block_sizes), "plan.blocks: one entry a group")
        for group, columns in enumerate(plan.blocks):
            self._grow_all(group, columns)
        self._check_step(plan)
        step = _Step(plan)
        self._step = step
        # As attention does: the step's own keys and values are all there before anybody reads.
        runs = list(zip(plan.rows, plan.starts, plan.num_tokens, plan.samples, strict=True))
        for row, start, count, samples in runs:
            self.write(row, start, count, bool(samples))
        for row, start, count, _ in runs:
            step.attended.append(self.read(row, start + count))
        self._check_sharing()

    def sample(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Return the result of the plan last executed, and append its tokens to their rows."""
        step, self._step = self._step, None
        if step is None:
            raise AssertionError("sample_tokens without execute_model")
        plan = step.plan
        allowed = _allowed_tokens(grammar, self.vocab_size)
        token_ids = array("i")
        logprobs: dict[int, LogprobColumns] = {}
        prompt_logprobs: dict[int, LogprobColumns] = {}
        for run, row in enumerate(plan.rows):
            state = self.rows[row]
            end = plan.starts[run] + plan.num_tokens[run]
            asked = state.request.sampling_params.prompt_logprobs
            followers = state.tokens[plan.starts[run] + 1 : end + 1]
            followers = followers[: max(0, state.request.num_prompt_tokens - 1 - plan.starts[run])]
            if asked is not None and followers:
                prompt_logprobs[run] = _columns(followers, asked, self.vocab_size)
            if not plan.samples[run]:
                continue
            token = self.choose(row, step.attended[run], allowed.get(run))
            state.append(token)
            token_ids.append(token)
            asked = state.request.sampling_params.logprobs
            if asked is not None:
                logprobs[run] = _columns([token], asked, self.vocab_size)
        return ModelRunnerOutput(
            step_id=plan.step_id,
            num_sampled=plan.samples[:],
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def leave(self, row: int) -> None:
        """End a row."""
        self._require(row in self.rows, f"row {row} leaves, but nobody has it")
        self.rows.pop(row, None)

    def join(self, request: NewRequest) -> None:
        """Let `request` take its row."""
        row, name = request.row, request.request_id
        held = self.rows.get(row)
        self._require(0 <= row < self.limits.max_num_seqs, f"{name} joins row {row}: no such row")
        self._require(held is None, f"{name} joins row {row}, which did not leave")
        self._require(
            all(state.request.request_id != name for state in self.rows.values()),
            f"{name} joins row {row}, but has another row",
        )
        self._require(
            request.generation > self._generations.get(row, 0),
            f"{name} joins row {row}, whose generation does not grow",
        )
        self._require(
            0 < request.num_prompt_tokens <= len(request.token_ids) < self.limits.max_model_len,
            f"{name} joins with {len(request.token_ids)} tokens",
        )
        self._generations[row] = request.generation
        state = RowState(
            request=request, tokens=[], contents=[], blocks=[[] for _ in self._block_sizes]
        )
        for token in request.token_ids:
            state.append(token)
        self.rows[row] = state

    def grow(self, group: int, row: int, block_ids: Sequence[int]) -> None:
        """Append blocks to a row's table."""
        self._require(row in self.rows, f"row {row} gets blocks, but nobody has it")
        blocks = self.rows[row].blocks[group]
        blocks.extend(block_ids)
        size = self._block_sizes[group]
        self._require(
            all(0 < block < self._kv_cache.num_blocks for block in block_ids),
            f"row {row} gets blocks that are not there: {list(block_ids)}",
        )
        self._require(len(set(blocks)) == len(blocks), f"row {row} has a block twice: {blocks}")
        self._require(
            (len(blocks) - 1) * size < self.limits.max_model_len,
            f"row {row} has {len(blocks)} blocks, more than a request can be long",
        )

    def write(self, row: int, start: int, count: int, samples: bool) -> None:
        """Compute tokens [start, start + count) of a row: fill their slots."""
        self._require(row in self.rows, f"row {row} runs, but nobody has it")
        state = self.rows[row]
        end, known = start + count, len(state.tokens)
        where = f"row {row} ({state.request.request_id}) runs positions {start} to {end - 1}"
        self._require(end <= known, f"{where}, but knows {known} tokens")
        self._require(samples == (end == known), f"{where} of {known}, with samples={samples}")
        self._require(
            state.num_computed in (-1, start),
            f"{where}, but is computed up to {state.num_computed}",
        )
        state.num_computed = end
        for group, size in enumerate(self._block_sizes):
            if not self._cached[group]:
                continue
            blocks = state.blocks[group]
            self._require(end <= len(blocks) * size, f"{where} in {len(blocks)} blocks of {size}")
            for position in range(start, min(end, known)):
                slot = (group, blocks[position // size], position % size)
                self._slots[slot] = state.contents[position]

    def read(self, row: int, end: int) -> int:
        """Return what attention makes of positions 0 to end - 1 of a row."""
        state = self.rows[row]
        if not any(self._cached):
            return sum(state.contents[:end]) & _MASK
        group = self._cached.index(True)
        size, blocks = self._block_sizes[group], state.blocks[group]
        attended = 0
        for position in range(end):
            block = blocks[position // size]
            content = self._slots.get((group, block, position % size), _UNDEFINED)
            if self.strict and content != state.contents[position]:
                raise AssertionError(
                    f"row {row} ({state.request.request_id}) reads position {position} from block "
                    f"{block}, which holds something else: stale, never computed or overwritten"
                )
            attended += content
        return attended & _MASK

    def choose(self, row: int, attended: int, allowed: frozenset[int] | None) -> int:
        """Return the token that is sampled."""
        token = mix(attended, self.rows[row].request.seed) % self.vocab_size
        while allowed is not None and token not in allowed:
            token = (token + 1) % self.vocab_size
        return token

    def poison(self) -> None:
        """Make the content of every block undefined that no row holds."""
        held = {
            (group, block)
            for state in self.rows.values()
            for group, blocks in enumerate(state.blocks)
            for block in blocks
        }
        self._slots = {slot: v for slot, v in self._slots.items() if slot[:2] in held}

    def shared_blocks(self) -> dict[tuple[int, int], list[int]]:
        """Return the rows that hold each (group, block) which more than one holds."""
        holders: dict[tuple[int, int], list[int]] = {}
        for row, state in self.rows.items():
            for group, blocks in enumerate(state.blocks):
                for block in blocks:
                    holders.setdefault((group, block), []).append(row)
        return {key: rows for key, rows in holders.items() if len(rows) > 1}

    def _grow_all(self, group: int, columns: BlockColumns) -> None:
        self._require(
            len(columns.rows) == len(columns.counts)
            and sum(columns.counts) == len(columns.block_ids),
            "the columns of blocks do not fit together",
        )
        end = 0
        for row, count in zip(columns.rows, columns.counts, strict=False):
            start, end = end, end + count
            self.grow(group, row, columns.block_ids[start:end])

    def _check_step(self, plan: SchedulerOutput) -> None:
        lengths = {len(plan.rows), len(plan.starts), len(plan.num_tokens), len(plan.samples)}
        self._require(len(lengths) == 1, "the plan's columns have different lengths")
        total, budget = sum(plan.num_tokens), self.limits.max_num_batched_tokens
        self._require(plan.total_num_tokens == total, "total_num_tokens is not the sum of runs")
        self._require(total <= budget, f"a step of {total} tokens, over the budget of {budget}")
        self._require(len(set(plan.rows)) == len(plan.rows), "a row runs twice in a step")

    def _check_sharing(self) -> None:
        if not self.strict:
            return
        for (group, block), rows in self.shared_blocks().items():
            places = {self.rows[row].blocks[group].index(block) for row in rows}
            end = (max(places) + 1) * self._block_sizes[group]
            states = [self.rows[row] for row in rows if self.rows[row].num_computed >= 0]
            full = all(state.num_computed >= end for state in states)
            equal = len({tuple(state.tokens[:end]) for state in states}) <= 1
            expect(
                len(places) == 1 and full and equal,
                f"rows {rows} share block {block}, which is not a full block of equal tokens",
            )

    def _require(self, condition: bool, message: str) -> None:
        if self.strict and not condition:
            raise AssertionError(f"step {self._last_step}: {message}")


def _columns(token_ids: Sequence[int], num_best: int, vocab_size: int) -> LogprobColumns:
    """Return columns for tokens in a row: each itself, then `num_best` made-up others."""
    flat = [(t + j) % vocab_size for t in token_ids for j in (0, *range(num_best))]
    return LogprobColumns(
        counts=array("i", [1 + num_best] * len(token_ids)),
        token_ids=array("i", flat),
        logprobs=array("f", [-1.0] * len(flat)),
        ranks=array("i", [1] * len(token_ids)),
    )


def _allowed_tokens(grammar: GrammarOutput | None, vocab_size: int) -> dict[int, frozenset[int]]:
    """Return run to the tokens that its grammar allows."""
    if grammar is None:
        return {}
    width = -(-vocab_size // 32) * 4
    allowed = {}
    for place, run in enumerate(grammar.runs):
        bits = int.from_bytes(grammar.bitmask[place * width : (place + 1) * width], "little")
        allowed[run] = frozenset(t for t in range(vocab_size) if bits >> t & 1)
    return allowed

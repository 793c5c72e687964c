"""A simulation of a worker's rows and blocks, and of the slots that attention reads.

A number represents the key and value of a position (`dovetail_devkit.rows.state`). It is stored by
block and offset, so a block that is stale, overwritten or owned by another request gives a wrong
number. A sampled token is computed only from the numbers that attention would read. A strict model
also raises AssertionError if a plan or a call violates the contract of `WorkerBase`. Tests override
methods.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.interfaces.scheduler import SchedulerLimits
from dovetail.interfaces.worker import GrammarOutput
from dovetail.plan import BlockColumns, NewRequest, SchedulerOutput
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail_devkit.expectation import expect
from dovetail_devkit.rows.columns import allowed_tokens, make_logprobs
from dovetail_devkit.rows.encoder import FakeEncoder
from dovetail_devkit.rows.pages import FlakyWorkerSide, SlotPages
from dovetail_devkit.rows.state import MASK, RowState, mix

COLDEST = 1e-3
"""Requests with this temperature or a lower one are greedy."""
_UNDEFINED = 0x0BAD_0BAD_0BAD_0BAD
"""The content of a slot that was never written."""


@dataclass(slots=True)
class _Step:
    """An executed plan, and the attention results of each scheduled request.

    runs: start, end and number of verified drafts of each request. attended: for each request, one
    number for each of its last 1 + num_drafts positions. report: that of the KV connector.
    """

    plan: SchedulerOutput
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    attended: list[list[int]] = field(default_factory=list)
    report: bytes = b""


class RowModel:
    """Executes plans on rows of numbers.

    strict: whether a violated rule raises; otherwise the model continues with wrong content.
    rows: the rows with a request, by row index; read-only for callers.
    """

    strict: ClassVar[bool] = True

    def __init__(
        self,
        limits: SchedulerLimits,
        kv_cache: KVCacheConfig,
        vocab_size: int,
        *,
        connected: bool = False,
    ) -> None:
        """connected: whether the model has a KV connector (`FlakyWorkerSide`)."""
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
        self._encoder = FakeEncoder(limits)
        self._side = FlakyWorkerSide() if connected else None
        if self._side is not None:
            self._side.register([SlotPages(self._slots)])

    def execute(self, plan: SchedulerOutput) -> None:
        """Apply the plan's leaves, joins and blocks. Compute its tokens for `sample`."""
        self._require(self._step is None, "sample_tokens was not called for the previous plan")
        self._require(
            plan.step_id > self._last_step,
            f"plans are out of order: step {plan.step_id} follows step {self._last_step}",
        )
        self._last_step = plan.step_id
        if self._side is not None:
            self._side.begin(plan.kv_transfer)
        for row in plan.leaves:
            self.leave(row)
        for request in plan.joins:
            self.join(request)
        self._require(
            len(plan.blocks) == len(self._block_sizes),
            f"plan.blocks has {len(plan.blocks)} entries for {len(self._block_sizes)} groups",
        )
        for group, columns in enumerate(plan.blocks):
            self._grow_all(group, columns)
        self._check_step(plan)
        if self.strict:
            self._encoder.execute(plan, self.rows)
        self._step = step = _Step(plan)
        drafts = plan.num_drafts or bytes(len(plan.rows))
        planned = zip(plan.rows, plan.starts, plan.num_tokens, drafts, strict=True)
        for row, start, count, num_drafts in planned:
            step.runs.append(self._place_run(row, start, count, num_drafts))
        # As in attention: all keys and values of the step are written before any is read.
        for row, samples, (start, end, _) in zip(plan.rows, plan.samples, step.runs, strict=True):
            self.write(row, start, end - start, bool(samples))
        for row, (_, end, num_drafts) in zip(plan.rows, step.runs, strict=True):
            ends = range(end - num_drafts, end + 1)
            step.attended.append([self.read(row, end) for end in ends])
        self._check_sharing()
        if self._side is not None:
            step.report = self._side.finish()

    def sample(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Return the result of the last executed plan, and append its tokens to their rows."""
        step, self._step = self._step, None
        if step is None:
            raise AssertionError("sample_tokens was called before execute_model")
        plan = step.plan
        allowed = allowed_tokens(grammar, self.vocab_size)
        num_sampled, token_ids = array("B"), array("i")
        logprobs: dict[int, LogprobColumns] = {}
        prompt_logprobs: dict[int, LogprobColumns] = {}
        for run, row in enumerate(plan.rows):
            state = self.rows[row]
            start, end, num_drafts = step.runs[run]
            num_logprobs = state.request.sampling_params.prompt_logprobs
            followers = state.tokens[start + 1 : end + 1]
            followers = followers[: max(0, state.request.num_prompt_tokens - 1 - start)]
            if num_logprobs is not None and followers:
                prompt_logprobs[run] = make_logprobs(followers, num_logprobs, self.vocab_size)
            drafts = state.take_last(num_drafts)
            sampled = []
            if plan.samples[run]:
                sampled = self._verify(row, drafts, step.attended[run], allowed.get(run))
                num_planned = plan.num_drafts[run] if plan.num_drafts else 0
                state.num_wrong.append(1 + num_planned - len(sampled))
            num_sampled.append(len(sampled))
            token_ids.extend(sampled)
            num_logprobs = state.request.sampling_params.logprobs
            if sampled and num_logprobs is not None:
                logprobs[run] = make_logprobs(sampled, num_logprobs, self.vocab_size)
        return ModelRunnerOutput(
            step_id=plan.step_id,
            num_sampled=num_sampled,
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            num_drafts=self._draft(plan),
            kv_transfer=step.report,
        )

    def leave(self, row: int) -> None:
        """Remove the request of a row."""
        self._require(row in self.rows, f"the plan releases row {row}, which has no request")
        self.rows.pop(row, None)

    def join(self, request: NewRequest) -> None:
        """Assign the row of the plan to a new request."""
        row, name = request.row, request.request_id
        held = self.rows.get(row)
        self._require(
            0 <= row < self.limits.max_num_seqs,
            f"{name} joins row {row}, but max_num_seqs is {self.limits.max_num_seqs}",
        )
        self._require(held is None, f"{name} joins row {row}, which was not released")
        self._require(
            all(state.request.request_id != name for state in self.rows.values()),
            f"{name} joins row {row}, but already has another row",
        )
        self._require(
            request.generation > self._generations.get(row, 0),
            f"{name} joins row {row} with generation {request.generation}, which is too low",
        )
        self._require(
            0 < request.num_prompt_tokens <= len(request.token_ids) < self.limits.max_model_len,
            f"{name} joins with {len(request.token_ids)} tokens, num_prompt_tokens="
            f"{request.num_prompt_tokens} and max_model_len={self.limits.max_model_len}",
        )
        self._generations[row] = request.generation
        state = RowState(request=request, blocks=[[] for _ in self._block_sizes])
        for token in request.token_ids:
            state.append(token)
        self.rows[row] = state

    def grow(self, group: int, row: int, block_ids: Sequence[int]) -> None:
        """Append blocks to a row's table."""
        self._require(row in self.rows, f"the plan gives blocks to row {row}, which has no request")
        blocks = self.rows[row].blocks[group]
        blocks.extend(block_ids)
        size = self._block_sizes[group]
        self._require(
            all(0 < block < self._kv_cache.num_blocks for block in block_ids),
            f"the plan gives row {row} blocks that do not exist: {list(block_ids)}",
        )
        self._require(
            len(set(blocks)) == len(blocks),
            f"the block table of row {row} has a block twice: {blocks}",
        )
        self._require(
            (len(blocks) - 1) * size < self.limits.max_model_len,
            f"row {row} has {len(blocks)} blocks, but max_model_len tokens need fewer",
        )

    def write(self, row: int, start: int, count: int, samples: bool) -> None:
        """Compute tokens [start, start + count) of a row, which fills their slots."""
        self._require(row in self.rows, f"the plan schedules row {row}, which has no request")
        state = self.rows[row]
        end, known = start + count, len(state.tokens)
        where = f"row {row} ({state.request.request_id}) computes positions {start} to {end - 1}"
        self._require(end <= known, f"{where}, but only {known} tokens are known")
        self._require(
            samples == (end == known),
            f"{where} with samples={samples}, but {known} tokens are known",
        )
        self._require(
            state.num_computed in (-1, start),
            f"{where}, but {state.num_computed} tokens are computed",
        )
        if self.strict and state.encoded:
            self._encoder.check(state, start, end)
        state.num_computed = end
        for group, size in enumerate(self._block_sizes):
            if not self._cached[group]:
                continue
            blocks = state.blocks[group]
            self._require(
                end <= len(blocks) * size,
                f"{where}, but has only {len(blocks)} blocks of {size} tokens",
            )
            for position in range(start, min(end, known)):
                slot = (group, blocks[position // size], position % size)
                self._slots[slot] = state.contents[position]
        if self._side is not None and not start % self._block_sizes[0]:
            self._side.spoilt.difference_update(state.blocks[0][start // self._block_sizes[0] :])

    def read(self, row: int, end: int) -> int:
        """Return the attention result of positions 0 to end - 1 of a row."""
        state = self.rows[row]
        if not any(self._cached):
            return sum(state.contents[:end]) & MASK
        group = self._cached.index(True)
        size, blocks = self._block_sizes[group], state.blocks[group]
        attended = 0
        for position in range(end):
            block = blocks[position // size]
            content = self._slots.get((group, block, position % size), _UNDEFINED)
            if self.strict and content != state.contents[position] and not self._is_spoilt(block):
                raise AssertionError(
                    f"row {row} ({state.request.request_id}) reads position {position} from block "
                    f"{block}, whose data is stale, overwritten or was never computed"
                )
            attended += content
        return attended & MASK

    def _is_spoilt(self, block: int) -> bool:
        """Return whether a load of `block` has failed. The scheduler is notified later."""
        return self._side is not None and block in self._side.spoilt

    def choose(self, row: int, attended: int, allowed: frozenset[int] | None) -> int:
        """Return the sampled token, which depends on the seed unless the request is greedy."""
        request = self.rows[row].request
        seed = request.seed if request.sampling_params.temperature > COLDEST else 0
        token = mix(attended, seed) % self.vocab_size
        while allowed is not None and token not in allowed:
            token = (token + 1) % self.vocab_size
        return token

    def poison(self) -> None:
        """Poison all blocks, except blocks in the table of a row, so that reads are detected."""
        held = {
            (group, block)
            for state in self.rows.values()
            for group, blocks in enumerate(state.blocks)
            for block in blocks
        }
        for slot in [slot for slot in self._slots if slot[:2] not in held]:
            del self._slots[slot]

    def held_blocks(self, names: Container[str]) -> set[int]:
        """Return the blocks in the block tables of the requests `names`."""
        return {
            block
            for state in self.rows.values()
            if state.request.request_id in names
            for table in state.blocks
            for block in table
            if block
        }

    def shared_blocks(self) -> dict[tuple[int, int], list[int]]:
        """Return the rows that share each block, by (group, block)."""
        holders: dict[tuple[int, int], list[int]] = {}
        for row, state in self.rows.items():
            for group, blocks in enumerate(state.blocks):
                for block in blocks:
                    holders.setdefault((group, block), []).append(row)
        return {key: rows for key, rows in holders.items() if len(rows) > 1}

    def _place_run(self, row: int, start: int, count: int, num_drafts: int) -> tuple[int, int, int]:
        """Return start, end and number of verified drafts of a scheduled request.

        A plan contains the last possible start and the largest possible number of drafts, because
        the results of earlier plans were not known when it was created. Drafts count as known until
        they are verified; drafts that the step does not verify are discarded.
        """
        self._require(row in self.rows, f"the plan schedules row {row}, which has no request")
        state, maximum = self.rows[row], self.limits.num_lookahead_tokens
        held, state.drafts = state.drafts, []
        self._require(
            0 <= num_drafts <= maximum,
            f"row {row} has num_drafts={num_drafts}, but num_lookahead_tokens is {maximum}",
        )
        late = start - state.num_computed if state.num_computed >= 0 else 0
        due = [0, *accumulate(reversed(state.num_wrong))]
        self._require(
            late in due,
            f"row {row} starts at position {start}, but {state.num_computed} tokens are computed, "
            f"and its last steps rejected {list(state.num_wrong)} drafts",
        )
        verified = held[:num_drafts]
        for token in verified:
            state.append(token)
        end = start - late + count - num_drafts + len(verified)
        return start - late, end, len(verified)

    def _verify(
        self, row: int, drafts: list[int], attended: list[int], allowed: frozenset[int] | None
    ) -> list[int]:
        """Append the accepted drafts and the next token to a row. Return these tokens."""
        state = self.rows[row]
        sampled: list[int] = []
        for index, number in enumerate(attended):
            token = self.choose(row, number, allowed)
            state.append(token)
            sampled.append(token)
            if token not in drafts[index : index + 1]:
                break
        state.num_computed = len(state.tokens) - 1
        return sampled

    def _draft(self, plan: SchedulerOutput) -> array[int]:
        """Return drafts for the requests that have sampled, by position in the plan."""
        maximum = self.limits.num_lookahead_tokens
        if not maximum:
            return array("B")
        for row, samples in zip(plan.rows, plan.samples, strict=True):
            if samples:
                self.rows[row].draft(maximum, self.vocab_size)
        return array("B", [len(self.rows[row].drafts) for row in plan.rows])

    def _grow_all(self, group: int, columns: BlockColumns) -> None:
        self._require(
            len(columns.rows) == len(columns.counts)
            and sum(columns.counts) == len(columns.block_ids),
            "the columns of plan.blocks have different lengths",
        )
        end = 0
        for row, count in zip(columns.rows, columns.counts, strict=False):
            start, end = end, end + count
            self.grow(group, row, columns.block_ids[start:end])

    def _check_step(self, plan: SchedulerOutput) -> None:
        lengths = {len(plan.rows), len(plan.starts), len(plan.num_tokens), len(plan.samples)}
        self._require(len(lengths) == 1, "the plan's columns have different lengths")
        total, budget = sum(plan.num_tokens), self.limits.max_num_batched_tokens
        self._require(
            plan.total_num_tokens == total,
            f"the plan has total_num_tokens={plan.total_num_tokens}; its runs have {total} tokens",
        )
        text = f"the plan schedules {total} tokens, but max_num_batched_tokens is {budget}"
        self._require(total <= budget, text)
        self._require(
            len(set(plan.rows)) == len(plan.rows),
            f"the plan schedules a row twice; its rows are {list(plan.rows)}",
        )

    def _check_sharing(self) -> None:
        if not self.strict:
            return
        for (group, block), rows in self.shared_blocks().items():
            indexes = {self.rows[row].blocks[group].index(block) for row in rows}
            end = (max(indexes) + 1) * self._block_sizes[group]
            states = [self.rows[row] for row in rows if self.rows[row].num_computed >= 0]
            full = all(state.num_computed >= end for state in states)
            equal = len({tuple(state.tokens[:end]) for state in states}) <= 1
            expect(
                len(indexes) == 1 and full and equal,
                f"the rows {rows} share block {block}, which is not full or has different tokens",
            )

    def _require(self, condition: bool, message: str) -> None:
        if self.strict and not condition:
            raise AssertionError(f"step {self._last_step}: {message}")

"""Calls a worker with valid plans, and checks each result against its plan.

The harness replaces the scheduler, so that a suite can choose the tokens that each row runs. The
harness uses only the contract of the worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from dovetail.interfaces.executor import Handle
from dovetail.interfaces.kv_cache import KVCacheConfig
from dovetail.interfaces.worker import GrammarOutput, WorkerBase
from dovetail.plan import NewRequest, SchedulerOutput, StepBuilder
from dovetail.result import ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.expectation import expect

GREEDY = SamplingParams(temperature=0.0)
ASYNC_OUTPUT = "async_output"
_UNKNOWN = -1
"""Placeholder for a sampled token that is not known yet."""


@dataclass(slots=True, kw_only=True)
class HarnessRow:
    """The state of a row.

    tokens: the known and pending tokens.
    num_computed: number of computed tokens.
    blocks: indices by position; an index represents one block of every KV-cache group.
    """

    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedStep:
    """A launched step.

    output: the worker's return value. waiting: map of row to its state and the index of its pending
    token.
    """

    plan: SchedulerOutput
    output: ModelRunnerOutput | Handle[ModelRunnerOutput]
    waiting: Mapping[int, tuple[HarnessRow, int]]


class WorkerHarness:
    """Executes steps on one started worker.

    rows: map of row index to the state of the row.
    results: the results of all processed steps.
    """

    def __init__(self, worker: WorkerBase, kv_cache: KVCacheConfig, *, seed: int = 0) -> None:
        self.worker = worker
        self.rows: dict[int, HarnessRow] = {}
        self.results: list[ModelRunnerOutput] = []
        self._block_size = kv_cache.block_size
        self._num_groups = len(kv_cache.groups)
        self._builder = StepBuilder(num_groups=self._num_groups)
        # In random order, to detect a worker that assumes contiguous blocks.
        self._free = list(range((kv_cache.num_blocks - 1) // self._num_groups))
        Random(seed).shuffle(self._free)
        self._generations: dict[int, int] = {}
        self._runs: list[int] = []

    def join(
        self,
        row: int,
        tokens: Sequence[int],
        *,
        num_prompt: int = 0,
        params: SamplingParams = GREEDY,
        shared: HarnessRow | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> HarnessRow:
        """Assign a row to a new request with `tokens` in the next step.

        num_prompt: number of prompt tokens among `tokens`; 0 if all are prompt tokens. shared:
        another row, whose full blocks are reused as after a prefix cache hit; their tokens must be
        equal.
        bad_words: the token ids of each bad word.
        """
        generation = self._generations[row] = self._generations.get(row, 0) + 1
        name = f"row-{row}-{generation}"
        self._builder.join(
            NewRequest(
                request_id=name,
                row=row,
                generation=generation,
                token_ids=array("i", tokens),
                num_prompt_tokens=num_prompt or len(tokens),
                sampling_params=params,
                stop_token_ids=frozenset(params.stop_token_ids or ()),
                bad_words_token_ids=bad_words,
                seed=params.seed or 0,
            )
        )
        state = self.rows[row] = HarnessRow(tokens=list(tokens))
        if shared is not None:
            maximum = min(shared.num_computed, len(tokens) - 1) // self._block_size
            state.num_computed = maximum * self._block_size
            self._give(row, shared.blocks[:maximum])
        return state

    def leave(self, row: int) -> None:
        """Release a row with the next step. Its blocks are reused first."""
        self._builder.leave(row)
        state = self.rows.pop(row)
        held = {block for other in self.rows.values() for block in other.blocks}
        self._free += [block for block in state.blocks if block not in held]

    def run(self, row: int, num_tokens: int = 0) -> None:
        """Compute `num_tokens` of a row in the next step, or all known tokens if it is 0."""
        state = self.rows[row]
        start, known = state.num_computed, len(state.tokens)
        end = start + num_tokens if num_tokens else known
        missing = -(-end // self._block_size) - len(state.blocks)
        # One call for each block: a row may appear more than once in the columns.
        for _ in range(missing):
            self._give(row, [self._free.pop()])
        self._builder.run(row, start, end - start, samples=end == known)
        state.num_computed = end
        self._runs.append(row)

    def step(self, grammar: GrammarOutput | None = None) -> dict[int, int]:
        """Execute the requested step, append the sampled tokens, and return them by row."""
        return self.settle(self.launch(grammar))

    def launch(self, grammar: GrammarOutput | None = None) -> LaunchedStep:
        """Launch the requested step. Rows that sample get a pending token.

        Another step may be launched before the result of this one is processed, if the worker
        provides "async_output".
        """
        plan = self._builder.build()
        fingerprint = repr(plan)
        self.worker.execute_model(plan)
        output = self.worker.sample_tokens(grammar)
        expect(repr(plan) == fingerprint, "the worker must not change the plan")
        runs, self._runs = self._runs, []
        waiting = {}
        for row, samples in zip(runs, plan.samples, strict=True):
            if samples:
                state = self.rows[row]
                waiting[row] = state, len(state.tokens)
                state.tokens.append(_UNKNOWN)
        return LaunchedStep(plan=plan, output=output, waiting=waiting)

    def settle(self, step: LaunchedStep) -> dict[int, int]:
        """Read the result of `step`, append the sampled tokens, and return them by row."""
        result = self._result(step.output)
        self._check(step.plan, result)
        self.results.append(result)
        sampled = dict(zip(step.waiting, result.token_ids, strict=True))
        for row, token in sampled.items():
            state, index = step.waiting[row]
            state.tokens[index] = token
        return sampled

    def _result(self, output: ModelRunnerOutput | Handle[ModelRunnerOutput]) -> ModelRunnerOutput:
        if isinstance(output, ModelRunnerOutput):
            return output
        late = ASYNC_OUTPUT in self.worker.provides
        expect(
            late,
            f"sample_tokens returns a {type(output).__name__}, but the worker does not declare "
            f"{ASYNC_OUTPUT!r}",
        )
        result = output.result()
        expect(output.done(), "done() of a handle must return True after result()")
        expect(
            output.result() == result,
            "each call of a handle's result() must return the same object",
        )
        return result

    def generate(self, row: int, num_tokens: int) -> list[int]:
        """Run steps with only this row until it has `num_tokens` new tokens. Return them."""
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            self.run(row)
            tokens.append(self.step()[row])
        return tokens

    def clear(self) -> None:
        """Release all rows, in a step without tokens."""
        for row in list(self.rows):
            self.leave(row)
        self.step()

    def _give(self, row: int, blocks: Sequence[int]) -> None:
        self.rows[row].blocks += blocks
        for group in range(self._num_groups):  # all groups share the same block ids
            ids = [1 + block * self._num_groups + group for block in blocks]
            self._builder.grow(row, ids, group=group)

    def _check(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        expect(
            result.step_id == plan.step_id,
            f"the result has step_id={result.step_id}, but its plan has step_id={plan.step_id}",
        )
        expect(
            list(result.num_sampled) == list(plan.samples),
            f"num_sampled of the result is {list(result.num_sampled)}, but `samples` of the plan "
            f"is {list(plan.samples)}",
        )
        expect(
            len(result.token_ids) == sum(plan.samples),
            f"the result has {len(result.token_ids)} tokens; the plan samples {sum(plan.samples)}",
        )
        columns = ((result.num_sampled, "B"), (result.token_ids, "i"))
        for column, typecode in columns:
            kind = getattr(column, "typecode", None)
            expect(
                kind == typecode,
                f"a column of the result has type {kind!r}; expected array({typecode!r})",
            )

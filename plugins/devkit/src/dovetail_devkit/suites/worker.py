"""The conformance suite of the worker contract, for any worker with a small model.

A worker is compared with itself: a request must get the same tokens alone, in chunks, with other
requests, in a reused row, after a preemption and with blocks that another row has filled. All
tokens must be equal, so use a float32 model such as `dovetail_devkit.tiny_model`, with a largest
logit much larger than the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import cast

from dovetail.interfaces.worker import (
    GrammarOutput,
    ModelInfo,
    ProvidesModel,
    WorkerBase,
    WorkerContext,
)
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.case import Case
from dovetail_devkit.expectation import SkipCase, checking, expect
from dovetail_devkit.worker.ahead import check_ahead
from dovetail_devkit.worker.harness import WorkerHarness
from dovetail_devkit.worker.sampling import SAMPLING_CHECKS, check_sampling
from dovetail_devkit.worker.start import NUM_ROWS, NUM_TOKENS, PROMPT_LENGTHS, bring_up

LONGEST = 64
MAX_STEP_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class _Case:
    """Data that all checks use. alone: the tokens that each prompt gets without other prompts."""

    harness: WorkerHarness
    info: ModelInfo
    prompts: list[list[int]]
    alone: list[list[int]]
    keeps_cache: bool


def check_worker(worker_cls: type[WorkerBase], context: WorkerContext) -> None:
    """Check a worker against its contract. Raise AssertionError with the violated rule.

    context: the worker's context, with a configuration that has max_num_seqs ≥ 4,
    max_num_batched_tokens ≥ 32 and max_model_len ≥ 64. Sampling fields are checked if the worker
    declares them in `provides`.
    """
    bench = WorkerBench(worker_cls, lambda: context)
    try:
        for case in worker_cases(bench):
            with suppress(SkipCase):
                case.run()
    finally:
        bench.close()


class WorkerBench:
    """Owns the checked worker: starts the worker when needed, and restarts it after a failed check.

    make_context: called once, at the first start.
    """

    def __init__(
        self, worker_cls: type[WorkerBase], make_context: Callable[[], WorkerContext]
    ) -> None:
        self._worker_cls = worker_cls
        self._make_context = cache(make_context)
        self._worker: WorkerBase | None = None

    def check_unstarted(self) -> None:
        """Check that a worker can be shut down before its start."""
        with checking("A worker can be shut down before its start."):
            unstarted = self._worker_cls(self._make_context())
            unstarted.shutdown()
            unstarted.shutdown()

    def start(self) -> _Case:
        """Return the data for the checks of a started worker."""
        if self._worker is None:
            context = self._make_context()
            with checking("worker constructor"):
                self._worker = self._worker_cls(context)
            with self._checking("worker start"):
                self._case = _start(self._worker)
        return self._case

    def check_start(self) -> None:
        """Check that the worker starts and runs prompts."""
        self.start()

    def run(self, check: Callable[[_Case], None]) -> None:
        """Run one check, then release all rows."""
        case = self.start()
        with self._checking("worker"):
            check(case)
            case.harness.clear()

    def close(self) -> None:
        """Shut the worker down, twice."""
        worker, self._worker = self._worker, None
        if worker is not None:
            with checking("shutdown, called twice"):
                worker.shutdown()
                worker.shutdown()

    @contextmanager
    def _checking(self, what: str) -> Iterator[None]:
        """Convert errors of the block to AssertionError. Shuts the worker down after an error."""
        try:
            with checking(what):
                yield
        except AssertionError:
            with suppress(AssertionError):
                self.close()
            raise

    def end(self) -> None:
        """Start a worker if no worker runs, and shut it down."""
        self.start()
        self.close()


def worker_cases(bench: WorkerBench) -> Iterator[Case]:
    """Yield the suite's cases. The last case or the caller closes `bench`."""
    yield Case(name="shutdown before start", run=bench.check_unstarted)
    yield Case(name="start and prompts", run=bench.check_start)
    for name, check in _CHECKS.items():
        yield Case(name=name, run=partial(bench.run, check))
    for name, (capability, sampling_check) in SAMPLING_CHECKS.items():
        run = partial(check_sampling, sampling_check, capability)
        yield Case(name=name, run=partial(bench.run, run))
    yield Case(name="shutdown, twice", run=bench.end)


def _start(worker: WorkerBase) -> _Case:
    info, kv_cache = bring_up(worker)
    expect(
        info.vocab_size > 1,
        f"get_model_info returns vocab_size={info.vocab_size}; it must be above 1",
    )
    expect(bool(info.supported_tasks), "get_model_info returns no supported_tasks")
    if "model" in worker.provides:
        model = cast(ProvidesModel, worker).get_model()
        same = model is not None and cast(ProvidesModel, worker).get_model() is model
        expect(same, "each call of get_model() must return the same loaded model")
    harness = WorkerHarness(worker, kv_cache)
    rng = Random(11)
    prompts = [[rng.randrange(info.vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]
    harness.step()
    alone = []
    for prompt in prompts:
        harness.join(0, prompt)
        tokens = harness.generate(0, NUM_TOKENS)
        invalid = [token for token in tokens if not 0 <= token < info.vocab_size]
        expect(
            not invalid,
            f"the sampled tokens {invalid} are outside of the vocabulary of {info.vocab_size}",
        )
        alone.append(tokens)
        harness.leave(0)
    harness.step()
    keeps_cache = any(group.bytes_per_block for group in kv_cache.groups)
    return _Case(harness=harness, info=info, prompts=prompts, alone=alone, keeps_cache=keeps_cache)


def _expect_tokens(case: _Case, index: int, tokens: list[int], how: str) -> None:
    expected = case.alone[index][: len(tokens)]
    expect(
        tokens == expected,
        f"a prompt of {len(case.prompts[index])} tokens gets {tokens}, but without other prompts "
        f"it gets {expected}. {how}",
    )


def _check_reuse(case: _Case) -> None:
    """Check that a prompt gets the same tokens in every reused row."""
    for turn in range(2 * NUM_ROWS):
        row, index = turn % NUM_ROWS, (3 * turn + 1) % len(case.prompts)
        case.harness.join(row, case.prompts[index])
        how = f"The prompt ran in row {row} after other prompts."
        _expect_tokens(case, index, case.harness.generate(row, NUM_TOKENS), how)
        case.harness.leave(row)


def _check_leave_and_join(case: _Case) -> None:
    """Check a row that is released and reused in one plan, with longer and shorter prompts."""
    harness = case.harness
    for index in (3, 0, 2, 1, 3):
        if 1 in harness.rows:
            harness.leave(1)
        harness.join(1, case.prompts[index])
        how = "The prompt ran in a row that was released in the same plan."
        _expect_tokens(case, index, harness.generate(1, 2), how)


def _check_chunks(case: _Case) -> None:
    """Check that a prompt in chunks gets the same tokens, and that only the last chunk samples."""
    harness = case.harness
    for pieces in ((1, 3), (4, 4), (5,), (1, 1, 1, 1, 1, 6)):
        harness.join(2, case.prompts[3])
        for num_tokens in pieces:
            harness.run(2, num_tokens)
            expect(not harness.step(), "the worker samples a token although plan.samples is 0")
        actual = harness.generate(2, NUM_TOKENS)
        how = f"The prompt ran in chunks of {pieces} tokens and a last chunk."
        _expect_tokens(case, 3, actual, how)
        harness.leave(2)


def _check_dependence(case: _Case) -> None:
    """Check that sampled tokens depend on the prompt.

    With a KV cache, they must depend on the first and on the last token of the prompt.
    """
    if case.keeps_cache:
        for position in (-1, 0):
            tokens = _answers(case, position)
            expect(
                len(tokens) > 1,
                f"the token at index {position} of a prompt has no effect: the worker always "
                f"samples {tokens}",
            )
        return
    positions = range(len(case.prompts[2]))
    depends = any(len(_answers(case, position)) > 1 for position in positions)
    expect(depends, "the sampled tokens must depend on the prompt")


def _answers(case: _Case, position: int) -> set[tuple[int, ...]]:
    """Return the sampled tokens for prompts that differ only in the token at index `position`."""
    tokens = set()
    for change in range(1, 7):
        prompt = list(case.prompts[2])
        prompt[position] = (prompt[position] + change) % case.info.vocab_size
        case.harness.join(0, prompt)
        tokens.add(tuple(case.harness.generate(0, 2)))
        case.harness.leave(0)
    return tokens


def _check_longest(case: _Case) -> None:
    """Check that a request of the maximum length gets the same tokens with different chunks."""
    rng, vocab_size = Random(5), case.info.vocab_size
    prompt = [rng.randrange(vocab_size) for _ in range(LONGEST - NUM_TOKENS)]
    tokens = []
    for first in (MAX_STEP_TOKENS, MAX_STEP_TOKENS - 5):
        case.harness.join(0, prompt)
        case.harness.run(0, first)
        case.harness.step()
        tokens.append(case.harness.generate(0, NUM_TOKENS))
        case.harness.leave(0)
    expect(
        tokens[0] == tokens[1],
        f"a request of {LONGEST} tokens gets {tokens[0]} or {tokens[1]}, depending on its chunks",
    )


def _check_together(case: _Case) -> None:
    """Check that requests that start one by one and run in changing order are independent."""
    harness = case.harness
    actual: dict[int, list[int]] = {row: [] for row in range(NUM_ROWS)}
    for turn in range(NUM_ROWS + NUM_TOKENS):
        if turn < NUM_ROWS:
            harness.join(turn, case.prompts[turn])
        rows = [row for row in harness.rows if len(actual[row]) < NUM_TOKENS]
        for row in rows[::-1] if turn % 2 else rows[1:] + rows[:1]:
            harness.run(row)
        for row, token in harness.step().items():
            actual[row].append(token)
    for row, tokens in actual.items():
        _expect_tokens(
            case, row, tokens, "The prompt ran with other rows, which joined one by one."
        )


def _check_mixed_plan(case: _Case) -> None:
    """Check a decode, a chunk, a whole prompt and an idle row in one plan."""
    harness = case.harness
    for row in (0, 1, 2):
        harness.join(row, case.prompts[row])
    first = {0: harness.generate(0, 1), 1: harness.generate(1, 1)}
    harness.run(2, 2)
    harness.run(0)
    harness.join(3, case.prompts[3])
    harness.run(3)
    sampled = harness.step()
    expect(
        sorted(sampled) == [0, 3],
        f"the worker samples tokens for the rows {sorted(sampled)}; expected the rows 0 and 3",
    )
    how = "The plan had a decode, a chunk of a prompt and a whole prompt."
    _expect_tokens(case, 0, [*first[0], sampled[0]], how)
    _expect_tokens(case, 3, [sampled[3]], how)
    _expect_tokens(case, 2, harness.generate(2, 2), how)
    how = "The row of the prompt was idle for one step."
    _expect_tokens(case, 1, [*first[1], *harness.generate(1, 2)], how)


def _check_resume(case: _Case) -> None:
    """Check that a resumed request continues with the same tokens."""
    harness = case.harness
    for index, num_kept in ((0, 3), (2, 1), (3, 2)):
        kept = case.alone[index][:num_kept]
        harness.join(0, [*case.prompts[index], *kept], num_prompt=len(case.prompts[index]))
        actual = kept + harness.generate(0, NUM_TOKENS - num_kept)
        how = f"The request was resumed after {num_kept} tokens."
        _expect_tokens(case, index, actual, how)
        harness.leave(0)


def _check_shared_prefix(case: _Case) -> None:
    """Check that a row can use blocks that another row has filled, and vice versa."""
    harness = case.harness
    first = harness.join(0, case.prompts[3])
    tokens = harness.generate(0, 2)
    if not case.keeps_cache:
        return
    harness.join(1, case.prompts[3], shared=first)
    actual = harness.generate(1, NUM_TOKENS)
    _expect_tokens(case, 3, actual, "The prompt used blocks that another row had filled.")
    harness.leave(1)
    how = "Another row used the blocks of the prompt for some steps."
    _expect_tokens(case, 3, tokens + harness.generate(0, 2), how)


def _check_seeds(case: _Case) -> None:
    """Check that a seed gives the same random tokens with other rows and in any row."""
    harness = case.harness
    seeded = SamplingParams(temperature=1.0, seed=5)
    harness.join(0, case.prompts[1], params=seeded)
    alone = harness.generate(0, NUM_TOKENS)
    harness.leave(0)
    harness.join(1, case.prompts[2], params=SamplingParams(temperature=1.0, seed=6))
    harness.join(3, case.prompts[1], params=seeded)
    together = []
    for _ in range(NUM_TOKENS):
        harness.run(1)
        harness.run(3)
        together.append(harness.step()[3])
    expect(
        together == alone,
        f"a request with a seed gets {alone} alone, but {together} in steps with another row",
    )


def _check_grammar(case: _Case) -> None:
    """Check that a grammar allows its request's token, and that other requests do not change."""
    harness, vocab_size = case.harness, case.info.vocab_size
    only = next(t for t in range(vocab_size) if t != case.alone[1][0])
    bitmask = (1 << only).to_bytes(-(-vocab_size // 32) * 4, "little")
    harness.join(0, case.prompts[2])
    harness.join(1, case.prompts[1])
    harness.run(0)
    harness.run(1)
    sampled = harness.step(GrammarOutput(runs=(1,), bitmask=bitmask))
    expect(
        sampled[1] == only,
        f"the worker samples {sampled[1]}, but the grammar allows only {only}",
    )
    _expect_tokens(case, 2, [sampled[0]], "Another row had a grammar.")


def _check_empty_plans(case: _Case) -> None:
    """Check that plans without tokens do not change the tokens of requests."""
    harness = case.harness
    harness.join(0, case.prompts[1])
    tokens = harness.generate(0, 2)
    harness.step()
    harness.join(1, case.prompts[2])
    harness.step()
    harness.leave(1)
    harness.step()
    tokens += harness.generate(0, 1)
    _expect_tokens(case, 1, tokens, "Plans without runs were executed between the tokens.")


_CHECKS: Mapping[str, Callable[[_Case], None]] = {
    "reused rows": _check_reuse,
    "one plan releases and reuses a row": _check_leave_and_join,
    "chunks do not change the tokens": _check_chunks,
    "tokens depend on the prompt": _check_dependence,
    "the maximum length is supported": _check_longest,
    "concurrent rows are independent": _check_together,
    "a mixed plan": _check_mixed_plan,
    "a resumed request continues with the same tokens": _check_resume,
    "a shared prefix": _check_shared_prefix,
    "seeds": _check_seeds,
    "a grammar": _check_grammar,
    "empty plans": _check_empty_plans,
    "a step ahead": check_ahead,
}

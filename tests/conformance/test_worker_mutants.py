"""The worker suite detects faulty workers: each mutant has one fault.

The workers use row models that do not check plans, so that the suite must detect the fault by the
tokens.
"""

from array import array
from dataclasses import replace
from threading import get_ident

import pytest
from conformance.messages import expect_rule_first

from dovetail_devkit.contexts import make_worker_context, write_fake_config
from dovetail_devkit.fakes.worker import FakeWorker, LateFakeWorker, LateOutput
from dovetail_devkit.rows.model import RowModel
from dovetail_devkit.rows.state import mix
from dovetail_devkit.suites.worker import check_worker


class UncheckedRowModel(RowModel):
    """A correct row model without checks."""

    strict = False


class StaleTokens(UncheckedRowModel):
    """Keeps the tokens of a row's previous request in addition to those of the new request."""

    def leave(self, row):
        pass

    def join(self, request):
        old = self.rows.get(request.row)
        super().join(request)
        new = self.rows[request.row]
        for token in old.tokens[len(new.tokens) : len(new.tokens) + 1] if old else ():
            new.tokens[-1] = token
            new.contents[-1] = mix(new.contents[-1], token)


class StaleBlocks(UncheckedRowModel):
    """Appends a new request's blocks to those of the previous request."""

    def join(self, request):
        old = self.rows.get(request.row)
        super().join(request)
        if old:
            self.rows[request.row].blocks = old.blocks

    def leave(self, row):
        pass

    def read(self, row, end):
        blocks = self.rows[row].blocks[0]
        return mix(super().read(row, end), len(blocks) > end)


class SamplesEverywhere(UncheckedRowModel):
    """Samples a token for every scheduled request, even if the plan does not."""

    def sample(self, grammar=None):
        self._step.plan = replace(
            self._step.plan, samples=array("B", [1] * len(self._step.plan.rows))
        )
        return super().sample(grammar)


class SeesNeighbors(UncheckedRowModel):
    """Lets tokens attend to other requests of the step."""

    def read(self, row, end):
        own = super().read(row, end)
        others = [super(SeesNeighbors, self).read(r, 1) for r in self.rows if r != row]
        return own + sum(others)


class SeesThePieceOnly(UncheckedRowModel):
    """Attends only to the current chunk."""

    def write(self, row, start, count, samples):
        self.start = start if count > 1 else 0
        super().write(row, start, count, samples)

    def read(self, row, end):
        own = super().read(row, end)
        return own - super().read(row, self.start) if self.start else own


class BlocksInOrder(UncheckedRowModel):
    """Assumes that a row's blocks are contiguous."""

    def read(self, row, end):
        state = self.rows[row]
        first, *_ = state.blocks[0]
        right, state.blocks[0] = state.blocks[0], list(range(first, first + len(state.blocks[0])))
        attended = super().read(row, end)
        state.blocks[0] = right
        return attended


class ForgetsItsTokens(UncheckedRowModel):
    """Continues with another token than the one it returned."""

    def sample(self, grammar=None):
        result = super().sample(grammar)
        report = array(
            "i", [(token + len(self.rows)) % self.vocab_size for token in result.token_ids]
        )
        return replace(result, token_ids=report)


class PromptIsAll(UncheckedRowModel):
    """Treats the generated tokens of a resumed request as a part of the prompt."""

    def join(self, request):
        kept = request.token_ids[: request.num_prompt_tokens]
        super().join(replace(request, token_ids=kept + request.token_ids[len(kept) :][::-1]))


class OneSeed(UncheckedRowModel):
    """Uses one random stream for all requests."""

    drawn = 0

    def choose(self, row, attended, allowed):
        self.drawn += 1 if self.rows[row].request.sampling_params.temperature else 0
        return super().choose(row, attended + self.drawn, allowed)


class NoGrammar(UncheckedRowModel):
    """Ignores the bit masks of grammars."""

    def choose(self, row, attended, allowed):
        return super().choose(row, attended, None)


class GrammarOnTheFirstRun(UncheckedRowModel):
    """Applies bit masks to the first rows instead of the constrained rows."""

    def sample(self, grammar=None):
        if grammar is not None:
            grammar = replace(grammar, runs=tuple(range(len(grammar.runs))))
        return super().sample(grammar)


class OtherOrder(UncheckedRowModel):
    """Returns tokens in the order of the rows instead of the order of the plan."""

    def sample(self, grammar=None):
        plan = self._step.plan
        result = super().sample(grammar)
        rows = [row for row, samples in zip(plan.rows, plan.samples, strict=True) if samples]
        by_row = sorted(zip(rows, result.token_ids, strict=True))
        return replace(result, token_ids=array("i", [token for _, token in by_row]))


class LateLogprobs(UncheckedRowModel):
    """Returns prompt log-probabilities one position late."""

    def sample(self, grammar=None):
        result = super().sample(grammar)
        late = {run: columns.after(1) for run, columns in result.prompt_logprobs.items()}
        return replace(result, prompt_logprobs=late)


class IgnoresThePrompt(UncheckedRowModel):
    """Ignores the prompt's tokens and uses only its length."""

    def join(self, request):
        super().join(replace(request, token_ids=array("i", [1] * len(request.token_ids))))


class WrongStep(UncheckedRowModel):
    """Returns the step id of the previous step."""

    def sample(self, grammar=None):
        result = super().sample(grammar)
        return replace(result, step_id=max(0, result.step_id - 1))


MODELS = [
    StaleTokens,
    StaleBlocks,
    SamplesEverywhere,
    SeesNeighbors,
    SeesThePieceOnly,
    BlocksInOrder,
    ForgetsItsTokens,
    PromptIsAll,
    OneSeed,
    NoGrammar,
    GrammarOnTheFirstRun,
    OtherOrder,
    LateLogprobs,
    IgnoresThePrompt,
    WrongStep,
]


class ChangesPlans(FakeWorker):
    """Modifies the plan that it executes."""

    row_model_cls = UncheckedRowModel

    def execute_model(self, plan):
        super().execute_model(plan)
        if plan.starts:
            plan.starts[0] += 1


class NeedsItsDeviceToEnd(FakeWorker):
    """Cannot be shut down before init_device."""

    def shutdown(self):
        del self.row_model


def on_rows_of(model):
    return type(model.__name__, (FakeWorker,), {"row_model_cls": model})


@pytest.fixture
def context(tmp_path):
    return make_worker_context(write_fake_config(tmp_path))


def test_a_correct_worker_without_internal_checks_passes(context):
    check_worker(on_rows_of(UncheckedRowModel), context)


@pytest.mark.parametrize("model", MODELS)
def test_the_suite_detects_a_worker_with_faulty_request_state(model, context):
    with pytest.raises(AssertionError) as actual:
        check_worker(on_rows_of(model), context)
    expect_rule_first(actual.value)


@pytest.mark.parametrize("mutant", [ChangesPlans, NeedsItsDeviceToEnd])
def test_a_faulty_worker_is_detected(mutant, context):
    with pytest.raises(AssertionError):
        check_worker(mutant, context)


class AppendsAtRead(LateFakeWorker):
    """Appends sampled tokens only when the result is read."""

    row_model_cls = UncheckedRowModel

    def sample_tokens(self, grammar=None):
        late = super().sample_tokens(grammar)
        rows = self.row_model.rows
        kept = {row: (rows[row], rows[row].tokens.pop()) for row in rows if rows[row].tokens}
        return GivesBack(late.output, kept)


class GivesBack(LateOutput):
    def __init__(self, output, blocks):
        super().__init__(output)
        self.kept = blocks

    def result(self, timeout=None):
        for state, token in self.kept.values():
            state.tokens.append(token)
        self.kept = {}
        return super().result(timeout)


class OneBuffer(LateFakeWorker):
    """Reuses one buffer for the tokens of all steps."""

    def sample_tokens(self, grammar=None):
        late = super().sample_tokens(grammar)
        self.buffer = self.__dict__.get("buffer", array("i"))
        self.buffer[:] = late.output.token_ids
        late.output = replace(late.output, token_ids=self.buffer)
        return late


class Late(LateOutput):
    """A handle of a step's result, with one fault."""


class NeverDone(Late):
    def done(self):
        return False


class IsDoneOnce(Late):
    def result(self, timeout=None):
        output, self.output = self.output, replace(self.output, token_ids=array("i"))
        return output


class OwnThread(Late):
    def __init__(self, output):
        super().__init__(output)
        self.thread = get_ident()

    def result(self, timeout=None):
        assert get_ident() == self.thread, "read by another thread"
        return super().result(timeout)


def late_worker_of(handle):
    def sample_tokens(self, grammar=None):
        return handle(FakeWorker.sample_tokens(self, grammar))

    return type(handle.__name__, (LateFakeWorker,), {"sample_tokens": sample_tokens})


class Undeclared(LateFakeWorker):
    """Returns handles without declaring the capability "async_output"."""

    provides = frozenset()


def test_a_worker_that_returns_handles_passes(context):
    check_worker(LateFakeWorker, context)


@pytest.mark.parametrize("handle", [NeverDone, IsDoneOnce, OwnThread])
def test_a_faulty_handle_is_detected(handle, context):
    with pytest.raises(AssertionError):
        check_worker(late_worker_of(handle), context)


@pytest.mark.parametrize("mutant", [AppendsAtRead, OneBuffer, Undeclared])
def test_a_worker_with_faulty_handles_is_detected(mutant, context):
    with pytest.raises(AssertionError):
        check_worker(mutant, context)

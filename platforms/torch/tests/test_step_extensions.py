"""Step extensions in the model runner: the rows that hooks receive, and the effect of errors."""

import re

import pytest
import torch

from dovetail.interfaces import StepExtension, StepExtensionContext
from dovetail_devkit.fakes.step_extension import ARGUMENT, FAIL_IN, FakeStepExtension
from dovetail_devkit.harnesses.runner_harness import (
    MAX_LEN,
    Backend,
    CountingBackend,
    Model,
    Steps,
    V,
)
from dovetail_torch.step_extensions import StepExtensions

PROMPT = [3, 1, 4, 1, 5, 9]
ASK = {"extra_args": {ARGUMENT: "count_up"}}
CONTEXT = StepExtensionContext(
    model=None, vocab_size=V, max_num_seqs=3, max_model_len=MAX_LEN, device=torch.device("cpu")
)


class Watched(FakeStepExtension):
    """Records the calls of its hooks."""

    def __init__(self):
        super().__init__(CONTEXT)
        self.calls = []

    def before_forward(self, batch):
        self.calls.append(("before_forward", [*batch.rows], [*batch.starts], [*batch.num_tokens]))
        super().before_forward(batch)

    def hidden_states(self, batch, hidden_TD):
        self.calls.append(("hidden_states", [*batch.first_tokens], hidden_TD.clone()))
        return super().hidden_states(batch, hidden_TD)

    def logits(self, rows, logits_RV):
        self.calls.append(("logits", [*rows], len(logits_RV)))
        return super().logits(rows, logits_RV)

    def after_sampling(self, rows, token_ids_R):
        self.calls.append(("after_sampling", [*rows], token_ids_R.tolist()))
        super().after_sampling(rows, token_ids_R)


@pytest.fixture(params=[Backend, CountingBackend])
def play(request, runner_of):
    """Return a function that runs plans with extensions and returns the steps and the model."""

    def make(*extensions):
        model = Model()
        named = {f"extension {i}": extension for i, extension in enumerate(extensions)}
        return Steps(runner_of(model, request.param, extensions=named)), model

    return make


def test_hooks_get_only_the_requests_that_use_the_extension(play):
    watched = Watched()
    steps, model = play(watched)
    steps.join(0, PROMPT, [7, 2, 5]).join(1, [8, 8, 2], [3, 4], **ASK)
    actual = steps.run((0, 0, 6, True), (1, 0, 3, True))
    assert actual == {0: model.answer(PROMPT, 1)[0], 1: 3}
    before, hidden, logits, after = watched.calls
    assert before == ("before_forward", [1], [0], [3])
    assert hidden[1] == [6] and torch.equal(hidden[2][-1], model.embedding_VD[[8, 8, 2]].sum(0))
    assert logits == ("logits", [1], 1) and after == ("after_sampling", [1], [3])
    assert steps.run((0, 6, 1, True), (1, 3, 1, True))[1] == 4
    assert steps.run((1, 4, 1, True), (0, 7, 1, True)) == {1: 5, 0: model.answer(PROMPT, 3)[2]}


def test_a_step_without_requests_that_use_an_extension_calls_no_hook(play):
    watched = Watched()
    steps, _ = play(watched)
    steps.join(0, PROMPT, [7, 2, 5]).join(1, [8, 8, 2], [3, 4], **ASK)
    steps.run((0, 0, 6, True))
    assert not watched.calls
    assert steps.runner._sampler.takes_best([0]) and not steps.runner._sampler.takes_best([1])


def test_a_hook_that_is_not_overridden_is_not_called(play):
    class OnlyAfter(StepExtension):
        taken = ()

        def __init__(self):
            pass

        def join(self, row, request):
            return True

        def leave(self, row):
            pass

        def after_sampling(self, rows, token_ids_R):
            self.taken = (*self.taken, *token_ids_R.tolist())

    extension = OnlyAfter()
    steps, model = play(extension)
    steps.join(0, PROMPT, [7, 2, 5]).run((0, 0, 6, True))
    assert model.num_left == [1]  # the step does not need hidden states of the other tokens
    assert steps.runner._sampler.takes_best([0])
    steps.run((0, 6, 1, True))
    assert list(extension.taken) == model.answer(PROMPT, 2)


def test_changed_hidden_states_change_only_the_logits_of_their_requests(play):
    class Zeroes(FakeStepExtension):
        def hidden_states(self, batch, hidden_TD):
            return hidden_TD.zero_()

        def logits(self, rows, logits_RV):
            assert not logits_RV.any()
            return logits_RV

    steps, model = play(Zeroes(CONTEXT))
    steps.join(0, PROMPT, [7, 2, 5], **ASK).join(1, [8, 8, 2], [3, 4])
    actual = steps.run((0, 0, 6, True), (1, 0, 3, True))
    assert actual == {0: 0, 1: model.answer([8, 8, 2], 1)[0]}


def test_step_extensions_run_in_the_configured_order(play):
    class DoublesLogits(FakeStepExtension):
        def logits(self, rows, logits_RV):
            return logits_RV * 2

    class RecordsMaxLogit(Watched):
        def logits(self, rows, logits_RV):
            self.best = float(logits_RV.max())
            return logits_RV

    sees = RecordsMaxLogit()
    steps, model = play(DoublesLogits(CONTEXT), sees)
    steps.join(0, PROMPT, [7, 2, 5], **ASK).run((0, 0, 6, True))
    assert sees.best == pytest.approx(2 * float(model.logits(PROMPT).max()))


@pytest.mark.parametrize("hook", FAIL_IN)
def test_an_error_in_a_hook_ends_only_the_request_that_caused_it(play, hook):
    steps, model = play(FakeStepExtension(CONTEXT))
    steps.join(0, PROMPT, [7, 2, 5])
    steps.join(1, [8, 8, 2], [3, 4], **ASK)
    steps.join(2, [4, 4], [6, 8], extra_args={ARGUMENT: hook})
    actual = steps.run((0, 0, 6, True), (2, 0, 2, True), (1, 0, 3, True))
    assert (actual[0], actual[1]) == (model.answer(PROMPT, 1)[0], 3)
    assert list(steps.output.errors) == [1]
    assert (
        f"extension 0 failed in {hook}: ValueError: row 2: requested failure in {hook}"
        in steps.output.errors[1]
    )
    actual = steps.run((1, 3, 1, True), (0, 6, 1, True), (2, 2, 1, True))
    assert (actual[0], actual[1]) == (model.answer(PROMPT, 2)[1], 4)
    assert list(steps.output.errors) == [2]
    steps.builder.leave(2)
    steps.join(2, [5, 6], [9], **ASK)
    assert steps.run((2, 0, 2, True)) == {2: 7} and not steps.output.errors


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda logits_RV: None, "return a tensor instead"),
        (lambda logits_RV: logits_RV[:, 1:], r"returned shape \(1, 22\)"),
        (lambda logits_RV: logits_RV.double(), "returned dtype torch.float64"),
    ],
)
def test_invalid_logits_from_a_hook_end_its_request(play, wrong, message):
    class Wrong(FakeStepExtension):
        def logits(self, rows, logits_RV):
            return wrong(logits_RV)

    steps, model = play(Wrong(CONTEXT))
    steps.join(0, PROMPT, [7, 2, 5], **ASK).join(1, [8, 8, 2], [3, 4])
    actual = steps.run((0, 0, 6, True), (1, 0, 3, True))
    assert actual[1] == model.answer([8, 8, 2], 1)[0]
    (error,) = steps.output.errors.values()
    assert re.search(message, error)


def test_without_extensions_no_state_is_stored(play):
    steps, _ = play()
    steps.join(0, PROMPT, [7, 2, 5], **ASK).run((0, 0, 6, True))
    extensions = steps.runner._extensions
    assert isinstance(extensions, StepExtensions)
    assert not (extensions.rows or extensions.errors)

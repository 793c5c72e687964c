"""The worker suite detects samplers that ignore or misuse one parameter."""

from contextlib import suppress
from dataclasses import fields, replace

import pytest

from dovetail.interfaces import FULL_SAMPLING, SAMPLING_CAPABILITIES
from dovetail.interfaces.sampling_support import ENGINE_FIELDS, WORKER_FIELDS
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.contexts import make_worker_context, write_fake_config
from dovetail_devkit.expectation import SkipCase
from dovetail_devkit.fakes.sampling_worker import (
    FakeSampler,
    SamplingRowModel,
    SamplingWorker,
    best_of,
)
from dovetail_devkit.suites.worker import WorkerBench, check_worker, worker_cases
from dovetail_devkit.worker.sampling import SAMPLING_CHECKS

OFF = SamplingParams()


def worker_ignoring_parameters(name):
    """Return a sampler that ignores the `name` parameter."""

    class Ignores(FakeSampler):
        def choose(self, logits, request, tokens, allowed):
            params = replace(request.sampling_params, **{name: getattr(OFF, name)})
            return super().choose(logits, replace(request, sampling_params=params), tokens, allowed)

    return Ignores


class SameNoiseEachStep(FakeSampler):
    def noise(self, request, position, count):
        return super().noise(request, 0, count)


class SameNoiseForAllSeeds(FakeSampler):
    def noise(self, request, position, count):
        return super().noise(replace(request, seed=7), position, count)


class NoiseFromTheJoin(FakeSampler):
    """Uses the number of steps since the request got its row instead of the token's position."""

    def noise(self, request, position, count):
        return super().noise(request, position - len(request.token_ids), count)


class AlwaysGreedy(FakeSampler):
    def noise(self, request, position, count):
        return [0.0] * count


class AlwaysTemperatureOne(FakeSampler):
    def temperature(self, request):
        return 1.0


class OneMoreOfTopK(FakeSampler):
    def truncate(self, logits, request):
        params = request.sampling_params
        more = replace(params, top_k=params.top_k + 1 if params.top_k else 0)
        return super().truncate(logits, replace(request, sampling_params=more))


class TopPIsGreedy(FakeSampler):
    def truncate(self, logits, request):
        params = request.sampling_params
        first = replace(params, top_k=1 if params.top_p < 1 else params.top_k)
        return super().truncate(logits, replace(request, sampling_params=first))


class NoBadWords(FakeSampler):
    def forbid(self, logits, request, tokens):
        super().forbid(logits, replace(request, bad_words_token_ids=()), tokens)


class LastTokensAreBadWords(FakeSampler):
    def forbid(self, logits, request, tokens):
        words = tuple(word[-1:] for word in request.bad_words_token_ids)
        super().forbid(logits, replace(request, bad_words_token_ids=words), tokens)


class PromptIsOutput(FakeSampler):
    def forbid(self, logits, request, tokens):
        super().forbid(logits, replace(request, num_prompt_tokens=0), tokens)


class JoinIsPrompt(FakeSampler):
    """Treats the generated tokens of a resumed request as a part of the prompt."""

    def choose(self, logits, request, tokens, allowed):
        request = replace(request, num_prompt_tokens=len(request.token_ids))
        return super().choose(logits, request, tokens, allowed)


class PenalizesThePrompt(FakeSampler):
    def penalize(self, logits, request, prompt, output):
        super().penalize(logits, request, (), [*prompt, *output])


class FrequencyIsPresence(FakeSampler):
    def penalize(self, logits, request, prompt, output):
        super().penalize(logits, request, prompt, list(dict.fromkeys(output)))


class PresenceCounts(FakeSampler):
    def penalize(self, logits, request, prompt, output):
        params = request.sampling_params
        both = params.frequency_penalty + params.presence_penalty
        both = replace(params, frequency_penalty=min(2, max(-2, both)), presence_penalty=0.0)
        super().penalize(logits, replace(request, sampling_params=both), prompt, output)


class RepetitionOfTheOutputOnly(FakeSampler):
    def penalize(self, logits, request, prompt, output):
        super().penalize(logits, request, (), output)


class RepetitionOfThePromptOnly(FakeSampler):
    def penalize(self, logits, request, prompt, output):
        super().penalize(logits, request, prompt, ())


class PenalizesSinceTheJoin(FakeSampler):
    """Does not count the tokens that were sampled after the request got its row."""

    def penalize(self, logits, request, prompt, output):
        joined = request.token_ids[request.num_prompt_tokens :]
        super().penalize(logits, request, prompt, joined)


class BansStopTokensForever(FakeSampler):
    """Bans stop tokens even after min_tokens."""

    def forbid(self, logits, request, tokens):
        super().forbid(logits, request, tokens)
        for token in request.stop_token_ids:
            logits[token] = float("-inf")


class FirstRequestForAll(FakeSampler):
    """Samples every request of a row with the parameters of the row's first request."""

    params = OFF

    def choose(self, logits, request, tokens, allowed):
        if request.sampling_params.allowed_token_ids:
            FirstRequestForAll.params = request.sampling_params
        if FirstRequestForAll.params is not OFF:
            request = replace(request, sampling_params=FirstRequestForAll.params)
        return super().choose(logits, request, tokens, allowed)


MUTANTS = [
    (AlwaysGreedy, "temperature=100 with"),
    (AlwaysTemperatureOne, "temperature=2e-05 must"),
    (SameNoiseEachStep, "each step must get new noise"),
    (SameNoiseForAllSeeds, "the worker ignores the temperature or the seed"),
    (NoiseFromTheJoin, "if it is resumed at this point"),
    (worker_ignoring_parameters("top_k"), "top_k=1"),
    (OneMoreOfTopK, "top_k=1"),
    (worker_ignoring_parameters("top_p"), "top_p=1e-6"),
    (TopPIsGreedy, "top_p=0.0258 must keep 2 to 3"),
    (worker_ignoring_parameters("min_p"), "min_p=1"),
    (worker_ignoring_parameters("frequency_penalty"), "frequency_penalty from -2 to 2"),
    (worker_ignoring_parameters("presence_penalty"), "presence_penalty=-2 must change"),
    (worker_ignoring_parameters("repetition_penalty"), "repetition_penalty=0.01 must favor"),
    (PenalizesThePrompt, "must not count tokens of the prompt"),
    (FrequencyIsPresence, "frequency_penalty from -2 to 2|presence_penalty=-2 must change"),
    (PresenceCounts, "presence_penalty=-2 must change"),
    (RepetitionOfTheOutputOnly, "must favor tokens of the prompt"),
    (RepetitionOfThePromptOnly, "frequency_penalty from -2 to 2"),
    (PenalizesSinceTheJoin, "must be counted equally"),
    (worker_ignoring_parameters("logit_bias"), "logit_bias="),
    (worker_ignoring_parameters("allowed_token_ids"), "allowed_token_ids="),
    (NoBadWords, "bad_words: the worker samples the bad word"),
    (LastTokensAreBadWords, "with tokens of the prompt|bad_words: with the bad word"),
    (PromptIsOutput, "bad_words: a bad word must not begin with tokens of the prompt"),
    (JoinIsPrompt, "frequency_penalty from -2 to 2"),
    (worker_ignoring_parameters("min_tokens"), "min_tokens=2: the first two tokens"),
    (BansStopTokensForever, "the second token may be a stop token"),
    (FirstRequestForAll, "the sampling parameters of other rows change the token of a greedy row"),
]


def check_with(sampler, context, provides=FULL_SAMPLING):
    """Run the sampling cases of the suite on a fake worker with the given sampler."""
    rows = type("Rows", (SamplingRowModel,), {"sampler_cls": sampler})
    parts = {"row_model_cls": rows, "provides": provides}
    bench = WorkerBench(type(sampler.__name__, (SamplingWorker,), parts), lambda: context)
    for case in worker_cases(bench):
        if case.name in SAMPLING_CHECKS:
            with suppress(SkipCase):
                case.run()
    bench.close()


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    return make_worker_context(write_fake_config(tmp_path_factory.mktemp("model")))


def test_a_worker_with_all_sampling_parameters_passes(context):
    check_worker(SamplingWorker, context)


@pytest.mark.costly
@pytest.mark.parametrize(
    ("sampler", "rule"), MUTANTS, ids=[f"{mutant.__name__}-{rule}" for mutant, rule in MUTANTS]
)
def test_a_faulty_sampler_is_detected(sampler, rule, context):
    with pytest.raises(AssertionError, match=rule):
        check_with(sampler, context)


@pytest.mark.costly
@pytest.mark.parametrize("field", SAMPLING_CAPABILITIES)
def test_undeclared_capabilities_of_a_worker_are_not_checked(field, context):
    check_with(
        worker_ignoring_parameters(field), context, FULL_SAMPLING - {SAMPLING_CAPABILITIES[field]}
    )


def test_every_field_of_sampling_params_is_handled_and_tested():
    """The engine, every worker, or a capability with a test case handles each field."""
    indexes = [ENGINE_FIELDS, WORKER_FIELDS, SAMPLING_CAPABILITIES.keys()]
    assert sorted(name for index in indexes for name in index) == sorted(
        field.name for field in fields(SamplingParams)
    )
    cases = " ".join([*SAMPLING_CHECKS, "structured_outputs: the suite's case 'a grammar'"])
    assert not [n for n in (*WORKER_FIELDS, *SAMPLING_CAPABILITIES) if n not in cases]


def test_best_of_returns_the_first_of_several_equal_values():
    assert best_of([1.0, 3.0, 3.0]) == 1

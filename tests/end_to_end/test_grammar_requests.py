"""Structured output through `LLM`: grammars constrain only the requests that use them."""

from __future__ import annotations

import pytest

from dovetail import LLM, SamplingParams, StructuredOutputsParams
from dovetail.errors import ContractError, PluginNotFoundError, RequestError
from dovetail_devkit.fakes.grammar import FAIL_IN, FakeGrammar
from dovetail_devkit.fakes.scheduler import FakeScheduler
from end_to_end.checkpoints import OPTIONS

PROMPTS = ["The quick brown fox", "Sphinx of black quartz", "Paged attention"] * 3
FEW_BLOCKS = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 60}
GRAMMAR = "50|60 61|71|81 " + " ".join(f"{n}|{n + 100}" for n in range(90, 124))
PLACES = {
    "depth 1": {"async_scheduling": False},
    "depth 2": {"async_scheduling": True},
    "worker process, depth 1": {"async_scheduling": False, "executor_backend": "multiproc"},
    "worker process, depth 2": {"async_scheduling": True, "executor_backend": "multiproc"},
    "engine process, depth 2": {"async_scheduling": True, "engine_process": True},
}


@pytest.fixture(scope="module", params=PLACES.values(), ids=PLACES)
def constrained(request, model_dir):
    """An engine with the fake grammar, and so few blocks that requests are preempted."""
    arguments = OPTIONS | FEW_BLOCKS | request.param
    with LLM(model_dir, grammar_backend=FakeGrammar, **arguments) as llm:
        yield llm


def params(form=None, text="", **changes):
    expected = None if form is None else StructuredOutputsParams(form=form, text=text)
    kwargs = {"max_tokens": 48, "temperature": 0.0, "structured_outputs": expected}
    return SamplingParams(**kwargs | changes)


def plain(index):
    changes = {"seed": 7, "temperature": 1.0} if index % 2 else {}
    return params(ignore_eos=True, **changes)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def obeys(token_ids, text):
    positions = [set(map(int, item.split("|"))) for item in text.split()]
    return all(map(set.__contains__, positions, token_ids))


@pytest.mark.costly
def test_grammars_constrain_only_the_requests_that_use_them(llm, constrained):
    expected = tokens_of(llm.generate(PROMPTS, [plain(i) for i in range(9)]))
    changes = {"seed": 3, "temperature": 1.0}
    asking = [plain(i) if i % 3 else params("token_ids", GRAMMAR, **changes) for i in range(9)]
    outputs = constrained.generate(PROMPTS, asking)
    assert constrained.llm_engine.last_stats.num_preemptions > 0
    for index, (output, before) in enumerate(zip(outputs, expected, strict=True)):
        actual = output.outputs[0]
        if index % 3:
            assert actual.token_ids == before
        else:
            assert obeys(actual.token_ids, GRAMMAR)
            assert actual.finish_reason == "stop"
            assert len(actual.token_ids) == len(GRAMMAR.split()) + 1  # ends with EOS
    assert constrained.reset_prefix_cache()


@pytest.mark.costly
def test_the_tokens_of_a_constrained_request_do_not_depend_on_its_batch(constrained):
    asking = params("token_ids", GRAMMAR, seed=3, temperature=1.0)
    (alone,) = tokens_of(constrained.generate(PROMPTS[0], asking))
    mates = [asking if i == 0 else plain(i) for i in range(9)]
    assert tokens_of(constrained.generate(PROMPTS, mates))[0] == alone


@pytest.mark.costly
@pytest.mark.sampled(8)
@pytest.mark.parametrize("where", FAIL_IN)
def test_an_error_in_a_grammar_ends_only_the_request_of_this_grammar(llm, constrained, where):
    expected = tokens_of(llm.generate(PROMPTS, [plain(i) for i in range(9)]))
    asking = [params("failing", where) if i == 4 else plain(i) for i in range(9)]
    outputs = constrained.generate(PROMPTS, asking)
    assert outputs[4].outputs[0].finish_reason == "error"
    assert "structured_outputs" in outputs[4].error
    for index in range(9):
        if index != 4:
            assert outputs[index].outputs[0].token_ids == expected[index]


def test_an_invalid_grammar_ends_the_request_with_an_error(constrained):
    (output,) = constrained.generate(PROMPTS[0], params("token_ids", "5|a"))
    assert output.outputs[0].finish_reason == "error"
    assert "must list token ids below" in output.error


def test_a_grammar_form_that_the_plugin_does_not_support_is_rejected(constrained):
    message = "'regex' is not a form of .* FakeGrammar; use one of failing, token_ids"
    with pytest.raises(RequestError, match=message) as rejection:
        constrained.generate(PROMPTS[0], params("regex", "a+"))
    assert rejection.value.parameter == "structured_outputs.form"


def test_a_request_with_a_grammar_is_rejected_if_no_grammar_plugin_may_be_used(model_dir, options):
    with (
        LLM(model_dir, plugins_deny=("grammar:*@*",), **options) as llm,
        pytest.raises(RequestError, match="Set grammar_backend") as rejection,
    ):
        llm.generate(PROMPTS[0], params("regex", "5"))
    assert rejection.value.parameter == "structured_outputs"


def test_a_grammar_plugin_is_rejected_if_the_scheduler_has_no_admission_gates(model_dir, options):
    with pytest.raises(ContractError, match="does not contain 'gates'"):
        LLM(model_dir, grammar_backend=FakeGrammar, scheduler_cls=FakeScheduler, **options)


@pytest.mark.costly
def test_a_grammar_plugin_that_is_not_installed_is_rejected(model_dir, options):
    with pytest.raises(PluginNotFoundError, match="grammar_backend='outlines'"):
        LLM(model_dir, grammar_backend="outlines", **options)

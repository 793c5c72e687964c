"""Step extensions through `LLM`: they act only on requests that use them."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dovetail import LLM, SamplingParams
from dovetail.errors import ConfigError, ContractError, RequestError
from dovetail_devkit.fakes.step_extension import ARGUMENT, FakeStepExtension
from dovetail_devkit.fakes.worker import FakeWorker
from end_to_end.checkpoints import OPTIONS

PROMPTS = ["The quick brown fox", "Sphinx of black quartz", "Paged attention"] * 3
NUM_TOKENS = 40
FEW_BLOCKS = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": 60}


def greedy(argument=None):
    extra_args = {} if argument is None else {ARGUMENT: argument}
    params = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    return SamplingParams(**params, extra_args=extra_args)


def seeded(argument=None):
    extra_args = {} if argument is None else {ARGUMENT: argument}
    return SamplingParams(max_tokens=NUM_TOKENS, seed=7, ignore_eos=True, extra_args=extra_args)


def tokens_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def counts_up(token_ids):
    return all(after == before + 1 for before, after in pairwise(token_ids))


PLACES = {
    "depth 1": {"async_scheduling": False},
    "depth 2": {"async_scheduling": True},
    "worker process": {"async_scheduling": True, "executor_backend": "multiproc"},
}


@pytest.fixture(scope="module", params=PLACES.values(), ids=PLACES)
def extended(request, model_dir):
    """An engine with the fake extension, and so few blocks that requests are preempted."""
    arguments = OPTIONS | FEW_BLOCKS | request.param
    with LLM(model_dir, step_extensions=[FakeStepExtension], **arguments) as llm:
        yield llm


@pytest.mark.costly
def test_a_step_extension_changes_only_requests_with_its_argument(llm, extended):
    plain = tokens_of(llm.generate(PROMPTS, [seeded() if i % 2 else greedy() for i in range(9)]))
    asking = [seeded() if i % 2 else greedy("count_up" if i % 3 == 0 else None) for i in range(9)]
    actual = tokens_of(extended.generate(PROMPTS, asking))
    assert extended.llm_engine.last_stats.num_preemptions > 0
    for index, (changed, before) in enumerate(zip(actual, plain, strict=True)):
        if asking[index].extra_args:
            first = extended.get_tokenizer().encode(PROMPTS[index])[-1] + 1
            assert changed[0] == first and counts_up(changed[: 320 - first])
        else:
            assert changed == before


@pytest.mark.sampled(8)
@pytest.mark.parametrize("hook", ["join", "before_forward", "hidden_states", "after_sampling"])
def test_an_error_in_a_hook_ends_only_its_own_request(llm, extended, hook):
    plain = tokens_of(llm.generate(PROMPTS, greedy()))
    asking = [greedy(hook if i == 4 else None) for i in range(9)]
    outputs = extended.generate(PROMPTS, asking)
    assert outputs[4].outputs[0].finish_reason == "error"
    assert f"'FakeStepExtension' failed in {hook}: ValueError" in outputs[4].error
    for index in range(9):
        if index != 4:
            assert outputs[index].outputs[0].token_ids == plain[index]
    again = extended.generate(PROMPTS, greedy())  # the extension has no state of the request
    assert tokens_of(again) == plain
    assert extended.reset_prefix_cache()


def test_invalid_extension_arguments_are_rejected_before_the_request_runs(extended):
    with pytest.raises(RequestError, match="must be 'count_up' or one of") as rejection:
        extended.generate(PROMPTS[0], greedy("fly"))
    assert rejection.value.parameter == f"extra_args.{ARGUMENT}"


def test_an_extension_named_twice_is_rejected(model_dir, options):
    named = [FakeStepExtension, FakeStepExtension]
    with pytest.raises(ConfigError, match="step_extensions contains 'FakeStepExtension' twice"):
        LLM(model_dir, step_extensions=named, **options)


@pytest.mark.costly
def test_a_worker_without_support_for_step_extensions_rejects_them(model_dir, options):
    with pytest.raises(ContractError, match="the worker FakeWorker would ignore it"):
        LLM(model_dir, step_extensions=[FakeStepExtension], worker_cls=FakeWorker, **options)

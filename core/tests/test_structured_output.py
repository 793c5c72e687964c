"""Structured output in the engine core: masks and failures."""

from dataclasses import replace
from itertools import pairwise

import pytest

from dovetail.engine.core import EngineCore
from dovetail.engine.structured_output import GrammarParts, StructuredOutput
from dovetail.errors import RequestError
from dovetail.interfaces import GrammarContext, Ready
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams, StructuredOutputsParams
from dovetail_devkit.fakes.grammar import FakeGrammar

FIRST_TOKEN, NUM_TOKENS = 100, 50
VOCAB = 200
END = 7
ANY = "|".join(str(FIRST_TOKEN + n) for n in range(NUM_TOKENS))
"""The tokens that the strict worker can sample; it ignores masks, so the grammar allows all."""


class Late:
    def __init__(self, executor, plan):
        self.executor, self.plan = executor, plan

    def done(self):
        return False

    def result(self, timeout=None):
        return self.executor.work(self.plan)


class Executor:
    """An executor with the strict worker that records calls and masks."""

    def __init__(self, worker, depth):
        self.worker, self.max_concurrent_steps = worker, depth
        self.calls, self.masks = [], {}
        self.sampled = None

    def execute_model(self, plan):
        self.plan = plan
        self.calls.append(("execute", plan.step_id))
        return Ready(None)

    def sample_tokens(self, grammar=None):
        self.calls.append(("sample", self.plan.step_id))
        self.masks[self.plan.step_id] = grammar
        return Late(self, self.plan)

    def work(self, plan):
        self.calls.append(("result", plan.step_id))
        result = self.worker.execute(plan)
        if self.sampled is not None and plan.rows:
            result = replace(result, token_ids=type(result.token_ids)("i", [self.sampled]))
        return result

    def shutdown(self):
        pass


@pytest.fixture(params=[1, 2, 4], ids=["depth 1", "depth 2", "depth 4"])
def engine(request, drive):
    structured = StructuredOutput(
        FakeGrammar, GrammarParts(lambda: None, lambda _: FakeGrammar(context())), VOCAB
    )
    driver = drive(gates=(structured,))
    core = EngineCore(
        Executor(driver.worker, request.param),
        driver.scheduler,
        vocab_size=VOCAB,
        max_model_len=64,
        structured_output=structured,
    )
    yield core
    core.shutdown()


def context():
    return GrammarContext(tokenizer=None, vocab_size=VOCAB)


def add(core, name, text=None, form="token_ids", num_tokens=4, **changes):
    section = None if text is None else StructuredOutputsParams(form=form, text=text)
    core.add_request(
        EngineCoreRequest(
            request_id=name,
            prompt_token_ids=(1, 2, 3),
            sampling_params=SamplingParams(max_tokens=num_tokens, structured_outputs=section),
            max_tokens=num_tokens,
            stop_token_ids=frozenset({END}),
            seed=5,
            **changes,
        )
    )


def run(core, limit=5000):
    """Run all requests to completion. Return tokens and finish reasons by request."""
    step = core.step if core.executor.max_concurrent_steps == 1 else core.step_with_batch_queue
    tokens, ends = {}, {}
    for _ in range(limit):
        if not core.has_work():
            return tokens, ends
        outputs = step()
        if outputs is None:
            continue
        first = 0
        for name, count in zip(outputs.request_ids, outputs.num_new_tokens, strict=True):
            tokens.setdefault(name, []).extend(outputs.token_ids[first : first + count])
            first += count
        ends |= {item.request_id: item for item in outputs.finished}
    raise AssertionError("not done")


def places(calls):
    return {call: index for index, call in enumerate(calls)}


def test_a_step_with_grammar_masks_is_sampled_after_the_result_of_the_previous_step(engine):
    add(engine, "a", " ".join([ANY] * 8))
    tokens, _ = run(engine)
    assert len(tokens["a"]) == 4
    executor = engine.executor
    index = places(executor.calls)
    steps = [step for step, mask in executor.masks.items() if mask is not None]
    assert len(steps) == 4
    for before, step in pairwise(steps):
        executed, sampled = index["execute", step], index["sample", step]
        assert index["result", before] < sampled
        if executor.max_concurrent_steps > 1:
            assert executed < index["result", before]


def test_steps_without_grammar_masks_are_sampled_immediately(engine):
    add(engine, "a")
    run(engine)
    calls = engine.executor.calls
    assert set(engine.executor.masks.values()) == {None}
    for index, call in enumerate(calls):
        if call[0] == "execute":
            assert calls[index + 1] == ("sample", call[1])


def test_grammar_masks_list_the_constrained_requests(engine):
    add(engine, "plain", num_tokens=8)
    add(engine, "a", " ".join([ANY] * 8))
    tokens, ends = run(engine)
    assert {name: len(own) for name, own in tokens.items()} == {"plain": 8, "a": 4}
    masks = [mask for mask in engine.executor.masks.values() if mask is not None]
    assert len(masks) == 4 and all(len(mask.runs) == 1 for mask in masks)
    allowed = int.from_bytes(masks[0].bitmask, "little")
    assert allowed == sum(1 << FIRST_TOKEN + n for n in range(NUM_TOKENS))
    assert {str(end.reason) for end in ends.values()} == {"length"}


def test_a_disallowed_token_ends_the_request_and_is_not_returned(engine):
    add(engine, "a", ANY)
    engine.executor.sampled = 9
    tokens, ends = run(engine)
    assert not tokens
    assert str(ends["a"].reason) == "error"
    assert ends["a"].message == (
        "structured_outputs: the request's grammar does not allow the sampled token 9."
    )


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("compile", "to compile structured_outputs: ValueError: requested failure in compile"),
        ("fill_bitmask", "failed in fill_bitmask: ValueError"),
        ("accept", "failed in accept: ValueError"),
        ("allow_nothing", "allows no token"),
    ],
)
def test_a_grammar_failure_ends_its_request(engine, where, message):
    engine.executor.sampled = 5
    add(engine, "a", where, form="failing", num_tokens=20)
    _, ends = run(engine)
    assert message in ends["a"].message and str(ends["a"].reason) == "error"
    engine.executor.sampled = None
    add(engine, "b")
    assert len(run(engine)[0]["b"]) == 4


def test_the_grammar_of_an_aborted_request_is_released(engine):
    add(engine, "a", " ".join([ANY] * 8))
    assert engine.abort_requests(["a"]) == ["a"]
    run(engine)
    add(engine, "a", " ".join([ANY] * 8))
    assert len(run(engine)[0]["a"]) == 4
    structured = engine._structured
    assert not (structured._matchers or structured._compiling or structured._masks)


def test_structured_output_without_a_stop_token_is_rejected(engine):
    with pytest.raises(RequestError, match="this model has none") as rejection:
        engine.add_request(
            EngineCoreRequest(
                request_id="a",
                prompt_token_ids=(1,),
                sampling_params=SamplingParams(
                    structured_outputs=StructuredOutputsParams(form="token_ids", text="5")
                ),
                max_tokens=4,
                seed=5,
            )
        )
    assert rejection.value.parameter == "structured_outputs"

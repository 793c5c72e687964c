"""Random calls of `LLM.generate`, `LLM.chat` and `AsyncLLM.generate` do not affect valid requests.

After each call: only typed errors were raised, the engine runs, valid requests have the same
tokens as alone, and no loop iteration used more than 50 ms of CPU time. The calls are the same in
each run: they follow from `SEED`, which is printed.
"""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import contextmanager
from importlib.resources import files

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from security import random_calls as calls
from security.engines import AsyncFrontEnd, engine_options

from dovetail import LLM, SamplingParams
from dovetail.errors import (
    CapacityError,
    EngineDeadError,
    RequestError,
    TransportError,
    UnavailableError,
    UserError,
)
from dovetail.interfaces.sampling_support import FULL_SAMPLING
from dovetail_devkit.fakes.worker import FakeWorker

SEED = 20261122
NUM_CALLS = 1_000
NUM_CALLS_SOAK = 15_000
MAX_CPU_S = 0.05
TYPED = (UserError, CapacityError)
FATAL = (EngineDeadError, UnavailableError, TransportError)

VALID = SamplingParams(max_tokens=4, seed=7, ignore_eos=True)
VALID_TEXT = "the valid request"
VALID_CHAT = [{"role": "user", "content": "a valid question"}]


class Capable(FakeWorker):
    """Declares every sampling capability, so that the engine accepts every parameter."""

    provides = FakeWorker.provides | FULL_SAMPLING


def options(folder):
    model = files("dovetail_demo_model") / "model"
    config = {"vocab_size": calls.VOCAB, "max_position_embeddings": 128}
    return engine_options(
        folder,
        config=config,
        worker_cls=Capable,
        tokenizer_mode="huggingface",
        tokenizer=str(model),
        max_num_seqs=64,
    )


def random(share, counts):
    """Return hypothesis settings for a test that makes the given share of all random calls."""
    return settings(
        max_examples=round(counts * share),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def limited_cpu():
    """Assert that the block uses less than `MAX_CPU_S` of CPU time of this thread."""
    start = time.thread_time()
    yield
    assert time.thread_time() - start < MAX_CPU_S


def tokens_of(output):
    assert output.error is None, output.error
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module", autouse=True)
def no_collector():
    """Disable garbage collection, because its duration depends on the heap of all tests, not on a
    client."""
    print(f"SEED = {SEED}")
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def collect_sometimes(num_calls):
    if num_calls % 500 == 0:
        gc.collect()


class LLMCalls:
    """Calls an `LLM` and checks the outcome of each call."""

    def __init__(self, folder):
        self.llm = LLM(**options(folder))
        core = self.llm.llm_engine.client.core
        self._add = core.add_request
        core.add_request = self.timed_add
        self.alone = [tokens_of(item) for item in self.llm.generate(VALID_TEXT, VALID)]
        self.chat_alone = [tokens_of(item) for item in self.llm.chat(VALID_CHAT, VALID)]
        self.num_rejected = self.num_served = 0

    def timed_add(self, request):
        with limited_cpu():
            return self._add(request)

    def check(self, call, alone):
        """Make a call between two valid requests and check the outcome."""
        collect_sometimes(self.num_rejected + self.num_served)
        try:
            outputs = call()
        except TYPED as error:
            assert not isinstance(error, FATAL)
            assert str(error) and len(str(error)) < 1000
            self.num_rejected += 1
            outputs = None
            self.check_alive()
        if outputs is not None:
            self.num_served += 1
            assert [tokens_of(outputs[0])] == [tokens_of(outputs[-1])] == alone
        engine = self.llm.llm_engine
        assert not engine.has_unfinished_requests() and not engine.client.core.has_work()

    def check_alive(self):
        outputs = self.llm.generate(VALID_TEXT, VALID)
        assert [tokens_of(output) for output in outputs] == self.alone


def make_params(maker):
    """Return the created parameters, or valid parameters if the creation is rejected."""
    with limited_cpu():
        try:
            return maker()
        except RequestError:
            return VALID


def call_generate(fuzzed, hostile, more):
    params = [VALID, *(make_params(maker) for _, maker in hostile), VALID]
    given_more = {"on_error": "return", **calls.make(more)}
    if not isinstance(given_more.get("priority", ()), (list, tuple)):
        others = [0] * len(hostile)
        given_more["priority"] = [
            0,
            given_more["priority"],
            *others,
        ]  # one value applies to all requests

    def call():
        prompts = [VALID_TEXT, *(maker() for maker, _ in hostile), VALID_TEXT]
        return fuzzed.llm.generate(prompts, params, **given_more)

    fuzzed.check(call, fuzzed.alone)


def call_chat(fuzzed, hostile, more):
    params = [VALID, *(make_params(maker) for _, maker in hostile), VALID]
    changing = {"chat_template", "chat_template_kwargs", "add_generation_prompt"}
    plain = not set(more) & (changing | {"tools", "tool_choice"})
    given_more = {"on_error": "return", **calls.make(more)}

    def call():
        several = [VALID_CHAT, *(maker() for maker, _ in hostile), VALID_CHAT]
        outputs = fuzzed.llm.chat(several, params, **given_more)
        return outputs if plain else None

    fuzzed.check(call, fuzzed.chat_alone)


class StreamCalls:
    """Calls an `AsyncLLM` and checks the outcome of each call."""

    def __init__(self, folder):
        self.front_end = AsyncFrontEnd(options(folder))
        self.alone = self.front_end.loop.run_until_complete(self.valid())
        self.num_rejected = self.num_served = 0

    async def valid(self):
        stream = self.front_end.llm.generate(VALID_TEXT, VALID)
        return tokens_of([output async for output in stream][-1])

    async def hostile(self, arguments):
        try:
            async for output in self.front_end.llm.generate(**arguments):
                assert output.error is None or isinstance(output.error, str)
            self.num_served += 1
        except TYPED as error:
            assert str(error) and len(str(error)) < 1000
            self.num_rejected += 1

    async def watch(self, turns):
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            turns.append(time.thread_time() - last)
            last = time.thread_time()

    async def both(self, arguments):
        turns = []
        watcher = asyncio.create_task(self.watch(turns))
        try:
            valid, _ = await asyncio.gather(self.valid(), self.hostile(arguments))
        finally:
            watcher.cancel()
        assert valid == self.alone
        assert max(turns) < MAX_CPU_S
        await self.front_end.llm.check_health()

    def check(self, prompt, params, more):
        collect_sometimes(self.num_rejected + self.num_served)
        kwargs = {"prompt": prompt(), "params": make_params(params), **calls.make(more)}
        loop = self.front_end.loop
        loop.run_until_complete(asyncio.wait_for(self.both(kwargs), 60))


def several(fuzzed):
    """Return a strategy that draws the prompts and parameters of one call's hostile requests."""
    return st.lists(st.tuples(fuzzed, calls.params), min_size=1, max_size=3)


def fuzz_generate(folder, counts):
    fuzzed = LLMCalls(folder)

    @seed(SEED)
    @random(0.3, counts)
    @given(several(calls.prompt), calls.arguments(calls.GENERATE))
    def fuzz(hostile, more):
        call_generate(fuzzed, hostile, more)

    with fuzzed.llm:
        fuzz()
    return fuzzed


def fuzz_chat(folder, counts):
    fuzzed = LLMCalls(folder)

    @seed(SEED)
    @random(0.3, counts)
    @given(several(calls.conversation), calls.arguments(calls.CHAT))
    def fuzz(hostile, more):
        call_chat(fuzzed, hostile, more)

    with fuzzed.llm:
        fuzz()
    return fuzzed


def fuzz_stream(folder, counts):
    fuzzed = StreamCalls(folder)

    @seed(SEED)
    @random(0.4, counts)
    @given(calls.prompt, calls.params, calls.arguments(calls.STREAM))
    def fuzz(prompt, params, more):
        fuzzed.check(prompt, params, more)

    try:
        fuzz()
    finally:
        fuzzed.front_end.close()
    return fuzzed


FUZZERS = {"generate": fuzz_generate, "chat": fuzz_chat, "stream": fuzz_stream}


@pytest.mark.costly
@pytest.mark.parametrize("front", FUZZERS)
def test_random_calls_do_not_affect_valid_requests(front, tmp_path):
    fuzzed = FUZZERS[front](tmp_path, NUM_CALLS)
    # The calls include rejected and served requests.
    assert fuzzed.num_rejected > 30 and fuzzed.num_served > 50


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("front", FUZZERS)
def test_very_many_random_calls_do_not_affect_valid_requests(front, tmp_path):
    FUZZERS[front](tmp_path, NUM_CALLS_SOAK)


def test_random_calls_use_every_parameter():
    from dataclasses import fields
    from inspect import signature

    from dovetail import AsyncLLM

    assert set(calls.PARAM_FIELDS) == {field.name for field in fields(SamplingParams)}
    sampled = {
        LLM.generate: {"prompts", "sampling_params", *calls.GENERATE},
        LLM.chat: {"messages", "sampling_params", *calls.CHAT},
        AsyncLLM.generate: {"prompt", "params", *calls.STREAM},
    }
    for method, names in sampled.items():
        assert set(signature(method).parameters) - {"self"} == names


def run_it(parameter, read):
    """Run the function without the guard that `guarded` adds."""
    return read()


# A fault, its target, and the front end with the random calls that must detect it.
FAULTS = {
    "prompts are read without a guard": (
        "generate",
        {"engine.input.prompt_reading.guarded": run_it},
    ),
    "lists are read without a guard": ("generate", {"value_checks.guarded": run_it}),
    "values are formatted without a length limit": ("generate", {"value_checks.shorten": repr}),
    "seeds differ from call to call": (
        "generate",
        {"engine.input.input_processor.completion_seed": lambda seed, index: time.monotonic_ns()},
    ),
    "template arguments are not checked": (
        "chat",
        {
            "entrypoints.call_arguments.check_template_arguments": (
                lambda template, kwargs, add_generation_prompt: kwargs or {}
            )
        },
    ),
    "ids are not checked": (
        "stream",
        {"engine.front_end.check_request_id": lambda *kwargs: kwargs[0]},
    ),
    "long texts are tokenized in the loop": (
        "stream",
        {
            "engine.input.input_processor.InputProcessor.check_length": lambda *kwargs: None,
            "engine.streaming.preparation.work_of": lambda checked: 0,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("front", "changes"), FAULTS.values(), ids=FAULTS)
def test_the_random_calls_detect_a_planted_fault(front, changes, tmp_path, monkeypatch):
    for index, instead in changes.items():
        monkeypatch.setattr(f"dovetail.{index}", instead)
    noticed = None
    try:
        FUZZERS[front](tmp_path, 10 * NUM_CALLS)
    except BaseException as error:
        noticed = error
    assert noticed is not None and not isinstance(noticed, TYPED)

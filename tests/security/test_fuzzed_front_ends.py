"""Random calls of `LLM.generate`, `LLM.chat`, `AsyncLLM.generate` beside innocent requests.

After each call: only typed errors were raised, the engine runs, innocent requests have the same
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
from security.engines import AsyncDoor, engine_options

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
NUM_CALLS = 2_000
NUM_CALLS_SOAK = 50_000
MOST_CPU_S = 0.05
TYPED = (UserError, CapacityError)
FATAL = (EngineDeadError, UnavailableError, TransportError)

INNOCENT = SamplingParams(max_tokens=4, seed=7, ignore_eos=True)
INNOCENT_TEXT = "the innocent request"
INNOCENT_CHAT = [{"role": "user", "content": "an innocent question"}]


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
    """Return the settings of a test that makes `share` of the calls."""
    return settings(
        max_examples=round(counts * share),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def limited_cpu():
    """Assert that the block uses less than `MOST_CPU_S` of CPU time of this thread."""
    start = time.thread_time()
    yield
    assert time.thread_time() - start < MOST_CPU_S


def tokens_of(output):
    assert output.error is None, output.error
    return [completion.token_ids for completion in output.outputs]


@pytest.fixture(scope="module", autouse=True)
def no_collector():
    """Disable garbage collection: its time depends on the heap of the session, not on a client."""
    print(f"SEED = {SEED}")
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def collect_sometimes(num_calls):
    if num_calls % 500 == 0:
        gc.collect()


class LLMCalls:
    """Calls of an `LLM`, each checked."""

    def __init__(self, folder):
        self.llm = LLM(**options(folder))
        core = self.llm.llm_engine.client.core
        self._add = core.add_request
        core.add_request = self.timed_add
        self.alone = [tokens_of(one) for one in self.llm.generate(INNOCENT_TEXT, INNOCENT)]
        self.chat_alone = [tokens_of(one) for one in self.llm.chat(INNOCENT_CHAT, INNOCENT)]
        self.num_refused = self.num_served = 0

    def timed_add(self, request):
        with limited_cpu():
            return self._add(request)

    def check(self, call, alone):
        """Make a call between two innocent requests and check the outcome."""
        collect_sometimes(self.num_refused + self.num_served)
        try:
            outputs = call()
        except TYPED as error:
            assert not isinstance(error, FATAL)
            assert str(error) and len(str(error)) < 1000
            self.num_refused += 1
            outputs = None
            self.check_alive()
        if outputs is not None:
            self.num_served += 1
            assert [tokens_of(outputs[0])] == [tokens_of(outputs[-1])] == alone
        engine = self.llm.llm_engine
        assert not engine.has_unfinished_requests() and not engine.client.core.has_work()

    def check_alive(self):
        outputs = self.llm.generate(INNOCENT_TEXT, INNOCENT)
        assert [tokens_of(one) for one in outputs] == self.alone


def make_params(maker):
    """Return the created parameters, or those of the innocent request if creation is refused."""
    with limited_cpu():
        try:
            return maker()
        except RequestError:
            return INNOCENT


def call_generate(fuzzed, hostile, more):
    params = [INNOCENT, *(make_params(maker) for _, maker in hostile), INNOCENT]
    given_more = {"on_error": "return", **calls.make(more)}
    if not isinstance(given_more.get("priority", ()), (list, tuple)):
        others = [0] * len(hostile)
        given_more["priority"] = [
            0,
            given_more["priority"],
            *others,
        ]  # one value applies to all requests

    def call():
        prompts = [INNOCENT_TEXT, *(maker() for maker, _ in hostile), INNOCENT_TEXT]
        return fuzzed.llm.generate(prompts, params, **given_more)

    fuzzed.check(call, fuzzed.alone)


def call_chat(fuzzed, hostile, more):
    params = [INNOCENT, *(make_params(maker) for _, maker in hostile), INNOCENT]
    plain = not set(more) & {"chat_template", "chat_template_kwargs", "add_generation_prompt"}
    given_more = {"on_error": "return", **calls.make(more)}

    def call():
        several = [INNOCENT_CHAT, *(maker() for maker, _ in hostile), INNOCENT_CHAT]
        outputs = fuzzed.llm.chat(several, params, **given_more)
        return outputs if plain else None

    fuzzed.check(call, fuzzed.chat_alone)


class StreamCalls:
    """Calls of an `AsyncLLM`, each checked."""

    def __init__(self, folder):
        self.door = AsyncDoor(options(folder))
        self.alone = self.door.loop.run_until_complete(self.innocent())
        self.num_refused = self.num_served = 0

    async def innocent(self):
        stream = self.door.llm.generate(INNOCENT_TEXT, INNOCENT)
        return tokens_of([output async for output in stream][-1])

    async def hostile(self, given):
        try:
            async for output in self.door.llm.generate(**given):
                assert output.error is None or isinstance(output.error, str)
            self.num_served += 1
        except TYPED as error:
            assert str(error) and len(str(error)) < 1000
            self.num_refused += 1

    async def watch(self, turns):
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            turns.append(time.thread_time() - last)
            last = time.thread_time()

    async def both(self, given):
        turns = []
        watcher = asyncio.create_task(self.watch(turns))
        try:
            innocent, _ = await asyncio.gather(self.innocent(), self.hostile(given))
        finally:
            watcher.cancel()
        assert innocent == self.alone
        assert max(turns) < MOST_CPU_S
        await self.door.llm.check_health()

    def check(self, prompt, params, more):
        collect_sometimes(self.num_refused + self.num_served)
        given = {"prompt": prompt(), "params": make_params(params), **calls.make(more)}
        loop = self.door.loop
        loop.run_until_complete(asyncio.wait_for(self.both(given), 60))


def several(fuzzed):
    """Return a strategy of the hostile requests of one call: prompts and parameters."""
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
        fuzzed.door.close()
    return fuzzed


FUZZERS = {"generate": fuzz_generate, "chat": fuzz_chat, "stream": fuzz_stream}


@pytest.mark.parametrize("front", FUZZERS)
def test_random_calls_do_not_affect_valid_requests(front, tmp_path):
    fuzzed = FUZZERS[front](tmp_path, NUM_CALLS)
    # The calls include refused and served requests.
    assert fuzzed.num_refused > 50 and fuzzed.num_served > 50


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("front", FUZZERS)
def test_very_many_random_calls_do_not_affect_valid_requests(front, tmp_path):
    FUZZERS[front](tmp_path, NUM_CALLS_SOAK)


def test_every_parameter_is_among_the_random_calls():
    from dataclasses import fields
    from inspect import signature

    from dovetail import AsyncLLM

    assert set(calls.PARAM_FIELDS) == {one.name for one in fields(SamplingParams)}
    drawn = {
        LLM.generate: {"prompts", "sampling_params", *calls.GENERATE},
        LLM.chat: {"messages", "sampling_params", *calls.CHAT},
        AsyncLLM.generate: {"prompt", "params", *calls.STREAM},
    }
    for method, names in drawn.items():
        assert set(signature(method).parameters) - {"self"} == names


def run_it(parameter, read):
    """Run the function without the guard of `guarded`."""
    return read()


# The fault, its target, and the front end whose random calls must notice it.
FAULTS = {
    "prompts are read without a guard": (
        "generate",
        {"engine.input.prompt_reading.guarded": run_it},
    ),
    "lists are read without a guard": ("generate", {"value_checks.guarded": run_it}),
    "values are shown whole": ("generate", {"value_checks.shorten": repr}),
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
        {"engine.front_end.check_request_id": lambda *given: given[0]},
    ),
    "long texts are tokenized in the loop": (
        "stream",
        {
            "engine.input.input_processor.InputProcessor._check_length": lambda *given: None,
            "engine.streaming.preparation.work_of": lambda checked: 0,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("front", "changes"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_noticed(front, changes, tmp_path, monkeypatch):
    for place, instead in changes.items():
        monkeypatch.setattr(f"dovetail.{place}", instead)
    noticed = None
    try:
        FUZZERS[front](tmp_path, NUM_CALLS)
    except BaseException as error:
        noticed = error
    assert noticed is not None and not isinstance(noticed, TYPED)

"""One engine called from several threads: `LLM` serializes the calls. `AsyncLLM` rejects them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from security.engines import AsyncFrontEnd, engine_options, open_llm

from dovetail import SamplingParams
from dovetail.errors import DovetailError, EngineDeadError, RequestError, UserError

NUM_THREADS = 4


@pytest.fixture(scope="module", params=["in process", "engine process"])
def llm(request, tmp_path_factory):
    with open_llm(request.param, engine_options(tmp_path_factory.mktemp("model"))) as opened_llm:
        yield opened_llm


def in_threads(call, num=NUM_THREADS):
    """Run `call(index)` in several threads. Return each thread's result or exception."""
    actual, start = [None] * num, threading.Barrier(num)

    def run(index):
        start.wait()
        try:
            actual[index] = call(index)
        except BaseException as error:
            actual[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a thread hangs"
    return actual


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_calls_from_several_threads_are_serialized(llm):
    def send(index):
        params = SamplingParams(max_tokens=20, seed=index, ignore_eos=True)
        return [tokens(llm.generate([f"{index}", f"again {index}"], params)) for _ in range(5)]

    alone = [send(index) for index in range(NUM_THREADS)]
    assert in_threads(send) == alone


def test_a_rejected_call_does_not_affect_other_threads(llm):
    params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True)
    alone = tokens(llm.generate("good", params))

    def send(index):
        if index % 2:
            with pytest.raises(RequestError):
                llm.generate(["good", [10**6]], params)
            return alone
        return tokens(llm.generate("good", params))

    assert in_threads(send, 6) == [alone] * 6


def test_an_engine_may_be_stepped_in_one_thread_and_read_in_others(llm):
    engine, params = llm.llm_engine, SamplingParams(max_tokens=10, ignore_eos=True)
    expected = {f"{thread}-{number}" for thread in range(3) for number in range(20)}
    ended = {}

    def work(index):
        if index < 3:
            for number in range(20):
                engine.add_request(f"{index}-{number}", "hello", params)
                if number % 5 == 0:
                    engine.abort_request(f"{index}-{number}")
            return
        while len(ended) < len(expected):
            ended.update({item.request_id: item for item in engine.step() if item.finished})

    assert in_threads(work) == [None] * 4
    assert set(ended) == expected and not engine.has_unfinished_requests()


def test_generate_raises_an_error_if_another_caller_reads_its_outputs(llm, monkeypatch):
    """`generate` misses outputs that a nested call of `step` returns, for example to a hook."""
    engine = llm.llm_engine
    step = engine.step

    def stolen():
        step()
        return []

    monkeypatch.setattr(engine, "step", stolen)
    with pytest.raises(UserError, match="taken by another caller"):
        llm.generate("a", SamplingParams(max_tokens=2))


@pytest.mark.costly
def test_an_async_engine_rejects_other_threads_and_loops(tmp_path):
    front_end = AsyncFrontEnd(engine_options(tmp_path))
    llm, params = front_end.llm, SamplingParams(max_tokens=30, seed=1, ignore_eos=True)

    async def last():
        return [output async for output in llm.generate("hello", params)][-1]

    async def call_all():
        collected = []
        calls = (last, lambda: llm.abort("a"), llm.pause, llm.resume, llm.reset_prefix_cache)
        for call in (*calls, llm.check_health, lambda: llm.collective_rpc("x")):
            with pytest.raises(UserError, match="another event loop") as rejected:
                await call()
            collected.append(rejected.value)
        return collected

    async def with_strangers():
        own = asyncio.create_task(last())
        await asyncio.sleep(0)
        strangers = await asyncio.to_thread(in_threads, lambda index: asyncio.run(call_all()))
        assert all(len(actual) == 7 for actual in strangers)
        return await own

    try:
        alone = front_end.loop.run_until_complete(last())
        output = front_end.loop.run_until_complete(asyncio.wait_for(with_strangers(), 60))
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        with pytest.raises(UserError, match="event loop"):
            llm.abort("a").send(None)  # no event loop
    finally:
        front_end.close()


@pytest.mark.costly
def test_an_async_engine_may_be_shut_down_from_another_thread(tmp_path):
    front_end = AsyncFrontEnd(engine_options(tmp_path))
    llm, params = front_end.llm, SamplingParams(max_tokens=200, ignore_eos=True)

    async def send():
        async for _ in llm.generate("hello", params):
            thread = threading.Thread(target=llm.shutdown)
            thread.start()
            await asyncio.to_thread(thread.join, 20)
        raise AssertionError("the stream has finished")

    try:
        with pytest.raises(EngineDeadError, match="shut down"):
            front_end.loop.run_until_complete(asyncio.wait_for(send(), 30))
    finally:
        front_end.close()


@pytest.mark.costly
def test_a_second_event_loop_is_rejected_during_a_stream(tmp_path):
    front_end = AsyncFrontEnd(engine_options(tmp_path))
    stream = front_end.llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))

    async def take():
        return await anext(stream)

    try:
        front_end.loop.run_until_complete(take())
        with pytest.raises(DovetailError, match="loop"):
            for _ in range(300):
                asyncio.run(asyncio.wait_for(take(), 5))
    finally:
        front_end.close()

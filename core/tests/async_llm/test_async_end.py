"""When an engine exits, all waiting callers are notified, and no process or file is left."""

import asyncio
import gc
import os
import signal
import tempfile
import time

import pytest

from dovetail import SamplingParams
from dovetail.engine.supervision.rules import SupervisionRules
from dovetail.errors import EngineDeadError, StalledError, UnavailableError
from dovetail.outputs import RequestOutputKind
from dovetail_devkit.harnesses.process_tree import children_of

NUM_KILLS = 3
FINAL = RequestOutputKind.FINAL_ONLY
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


async def collect(stream):
    return [output async for output in stream]


async def wait_in_every_way(llm, *calls):
    """Await streams of all output kinds and the coroutines `calls`. Return results and errors."""
    late = llm.generate("late", LONG)
    await anext(late)
    waits = [collect(llm.generate("a", LONG, output_kind=kind)) for kind in RequestOutputKind]
    actual = await asyncio.gather(*waits, *calls, return_exceptions=True)
    return [*actual, *await asyncio.gather(collect(late), return_exceptions=True)]


async def end(llm, kill, *calls):
    """Call `kill` to stop the engine while callers wait. Return their results and the time in s."""
    waiting = asyncio.create_task(wait_in_every_way(llm, *calls))
    await asyncio.sleep(0.2)
    assert not waiting.done() and await llm.is_ready()
    start_s = time.monotonic()
    kill()
    return await waiting, time.monotonic() - start_s


def check_end(bench, llm, outputs, took_s, message):
    assert took_s < 2
    assert {type(error) for error in outputs} == {EngineDeadError} and len(outputs) >= 4
    assert all(message in str(error) for error in outputs)
    for call in (llm.check_health, llm.resume, lambda: collect(llm.generate("a"))):
        with pytest.raises(EngineDeadError, match=message):
            bench.run(call())
    assert not bench.run(llm.is_ready())
    llm.shutdown()


@pytest.fixture
def nothing_left(bench, monkeypatch, tmp_path_factory):
    """Check that no descriptors, shared memory or directories of engines are left."""
    folder = tmp_path_factory.mktemp("t")  # Sockets need a short path.
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def open_resources():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm"), os.listdir(folder)

    bench.run(asyncio.to_thread(int))  # creates the loop's threads and descriptors
    before = open_resources()
    yield
    assert open_resources() == before


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("number", range(NUM_KILLS))
def test_all_callers_are_notified_when_the_engine_is_killed(bench, nothing_left, number):
    starting = bench.start(worker_config={"step_s": 0.01})
    pid = starting.client.process_id
    call = starting.collective_rpc("doze", 30)
    actual, took_s = bench.run(end(starting, lambda: os.kill(pid, signal.SIGKILL), call))
    check_end(bench, starting, actual, took_s, "SIGKILL")


@pytest.mark.costly
def test_all_callers_are_notified_when_the_engine_shuts_down(bench, nothing_left):
    starting = bench.start(worker_config={"step_s": 0.01})
    actual, took_s = bench.run(end(starting, starting.shutdown))
    check_end(bench, starting, actual, took_s, "was shut down")


@pytest.mark.costly
def test_the_error_of_a_failed_step_contains_no_prompts(bench, nothing_left):
    starting = bench.start(worker_config={"fails_at": 5})

    async def ask():
        pending = [collect(starting.generate(word, LONG)) for word in ("secret", "words")]
        return await asyncio.gather(*pending, return_exceptions=True)

    errors = bench.run(ask())
    assert {type(error) for error in errors} == {EngineDeadError}
    assert "the chip melted" in str(errors[0]) and "step 5" in errors[0].digest
    assert "secret" not in str(errors[0])
    starting.shutdown()


@pytest.mark.costly
def test_a_killed_supervised_engine_is_restarted(bench, nothing_left):
    starting = bench.start(
        worker_config={"step_s": 0.01}, rules=SupervisionRules(first_delay_s=0.05)
    )
    short = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)

    async def ask():
        (reference,) = await collect(starting.generate("a", short, output_kind=FINAL))
        pending = [asyncio.create_task(collect(starting.generate("b", LONG))) for _ in range(3)]
        await asyncio.sleep(0.1)
        os.kill(starting.client.process_id, signal.SIGKILL)
        start_s = time.monotonic()
        lost = [outputs[-1] for outputs in await asyncio.gather(*pending)]
        lost_s = time.monotonic() - start_s
        assert not await starting.is_ready()
        with pytest.raises(UnavailableError):
            await collect(starting.generate("a", short))
        with pytest.raises(UnavailableError):
            await starting.check_health()
        while not await starting.is_ready():
            await asyncio.sleep(0.02)
        again_s = time.monotonic() - start_s
        assert await collect(starting.generate("a", short, output_kind=FINAL)) != []
        (again,) = await collect(starting.generate("a", short, output_kind=FINAL))
        assert again.outputs == reference.outputs
        return lost, lost_s, again_s

    lost, lost_s, again_s = bench.run(ask())
    assert lost_s < 2 and again_s < 10
    for output in lost:
        assert output.finished and "SIGKILL" in output.error
        assert output.outputs[0].finish_reason == "error" and output.outputs[0].token_ids
    assert starting.num_unfinished == 0
    starting.shutdown()


@pytest.mark.costly
def test_finished_outputs_are_returned_before_the_engine_error(bench, nothing_left):
    starting = bench.start(worker_config={"fails_at": 50})

    async def ask():
        stream = starting.generate("a", LONG, output_kind=RequestOutputKind.DELTA)
        num_tokens = len((await anext(stream)).outputs[0].token_ids)
        with pytest.raises(EngineDeadError):
            while True:
                await starting.check_health()
                await asyncio.sleep(0.01)
        num_tokens += len((await anext(stream)).outputs[0].token_ids)
        with pytest.raises(EngineDeadError):
            await anext(stream)
        return num_tokens

    assert bench.run(ask()) == 50
    starting.shutdown()


@pytest.mark.costly
def test_an_engine_stopped_by_sigstop_is_not_ready_until_it_continues(bench, nothing_left):
    starting = bench.start(worker_config={"step_s": 0.01})
    pid = starting.client.process_id

    async def ask():
        stream = starting.generate("a", LONG)
        await anext(stream)
        await asyncio.sleep(0.9)
        await starting.check_health(max_silence_s=0.8)  # a completed step counts as a heartbeat
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(1.1)
        assert await starting.is_ready() and not await starting.is_ready(max_silence_s=0.8)
        with pytest.raises(StalledError, match="no heartbeat for 1"):
            await starting.check_health(max_silence_s=0.8)
        os.kill(pid, signal.SIGCONT)
        await anext(stream)
        await asyncio.sleep(0.1)
        await starting.check_health(max_silence_s=0.8)
        await stream.aclose()

    bench.run(ask())
    starting.shutdown()


@pytest.mark.costly
def test_an_event_loop_can_be_closed_before_the_engine_is_shut_down(bench, nothing_left):
    starting = bench.start(worker_config={"step_s": 0.01})

    async def ask():
        streams = [starting.generate("a", LONG) for _ in range(3)]
        await asyncio.gather(*map(anext, streams))
        stays = asyncio.create_task(collect(starting.generate("b", LONG)))
        await asyncio.sleep(0.05)
        assert not stays.done()
        return streams

    asyncio.run(ask())
    gc.collect()
    starting.shutdown()


@pytest.mark.costly
def test_canceling_every_task_leaves_no_caller_waiting(bench, nothing_left):
    starting = bench.start(worker_config={"step_s": 0.01})

    async def ask():
        stream = starting.generate("a", LONG)
        await anext(stream)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name() == "engine-outputs":
                task.cancel()
        with pytest.raises(EngineDeadError, match="cancelled the task"):
            await collect(stream)

    bench.run(ask())
    starting.shutdown()


@pytest.mark.costly
def test_leaving_a_with_block_shuts_the_engine_down(bench, nothing_left):
    async def ask():
        async with bench.start() as starting:
            outputs = await collect(starting.generate("a", SamplingParams(max_tokens=3)))
        with pytest.raises(EngineDeadError, match="shut down"):
            await starting.check_health()
        return outputs

    assert bench.run(ask())[-1].finished


@pytest.mark.costly
def test_a_failed_start_leaves_no_processes_or_files(bench, nothing_left):
    with pytest.raises(Exception, match="no such luck"):
        bench.start(stat_loggers=(bench.parts.FailingStatLogger,))


@pytest.mark.costly
@pytest.mark.sampled(4)
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_the_error_for_a_killed_idle_worker_names_it_within_a_second(bench, used):
    llm = bench.start(executor_backend="multiproc")
    pid = llm.client.process_id
    (worker,) = children_of(pid)

    async def look():
        if used:
            await collect(llm.generate("a", SamplingParams(max_tokens=2)))
        assert await llm.is_ready()
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        while await llm.is_ready(max_silence_s=60):
            await asyncio.sleep(0.02)
        took_s = time.monotonic() - start
        for call in (llm.check_health(), collect(llm.generate("b", LONG))):
            with pytest.raises(EngineDeadError, match=rf"process {worker}\) ended by SIGKILL"):
                await call
        return took_s

    assert bench.run(look()) < 1.0

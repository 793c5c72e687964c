"""Requests that are canceled, aborted or timed out are freed completely."""

import asyncio
import time
from random import Random

import pytest

from dovetail import SamplingParams
from dovetail.errors import MessageError
from dovetail.outputs import RequestOutputKind

SEED = 20261121
NUM_ABORTS = 10_000
STEP_S = 0.01
MAX_LATE_S = 0.2
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
FINAL = RequestOutputKind.FINAL_ONLY


@pytest.fixture(scope="module")
def slow(bench):
    """An engine whose steps take 10 ms."""
    return bench.start(worker_config={"step_s": STEP_S}, max_num_seqs=16)


async def counts_become(llm, *expected):
    """Wait for the given numbers of running and waiting requests and used blocks."""
    for _ in range(200):
        stats = llm.last_stats
        counts = (stats.num_running, stats.num_waiting, stats.num_used_blocks)
        if counts == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{counts} is not {expected}")


async def last(stream):
    return [output async for output in stream][-1]


async def is_idle_within(llm, seconds):
    """Return whether all blocks become free within a time limit."""
    end_s = time.monotonic() + seconds
    while not (free := await llm.reset_prefix_cache()) and time.monotonic() < end_s:
        await asyncio.sleep(0.01)
    return free


async def leave_loop(stream):
    async for _ in stream:
        break


async def close(stream):
    await anext(stream)
    await stream.aclose()


async def cancel(stream):
    task = asyncio.create_task(last(stream))
    await asyncio.sleep(5 * STEP_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(stream):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(last(stream), 5 * STEP_S)


async def fail(stream):
    try:
        async for _ in stream:
            raise LookupError
    except LookupError:
        pass


def is_shared(stats):
    """Return whether the engine has more than one request."""
    return stats.num_running + stats.num_waiting > 1


@pytest.mark.parametrize("leave", [leave_loop, close, cancel, time_out, fail])
@pytest.mark.parametrize("n", [1, 3])
def test_canceling_a_caller_frees_its_request_within_a_few_steps(bench, slow, leave, n):
    async def ask():
        stays = slow.generate("a", LONG, "stays")
        await anext(stays)
        await leave(slow.generate("b", SamplingParams(n=n, max_tokens=400, ignore_eos=True)))
        steps = slow.last_stats.step_id
        # The outputs of several steps may be in transit if the machine is busy.
        while is_shared(slow.last_stats) and slow.last_stats.step_id < steps + 40:
            await anext(stays)
        stats = slow.last_stats
        await stays.aclose()
        assert await is_idle_within(slow, 1)
        return stats

    stats = bench.run(ask())
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.num_used_blocks <= 2  # blocks of the running request
    assert slow.num_unfinished == 0


def test_an_abort_returns_the_partial_output(bench, slow):
    async def ask(kind):
        stream = slow.generate("a", LONG, "a", output_kind=kind)
        task = asyncio.create_task(last(stream))
        await asyncio.sleep(20 * STEP_S)
        await slow.abort(["a", "unknown"])
        await slow.abort("a")
        return await task

    for kind in (RequestOutputKind.CUMULATIVE, FINAL):
        output = bench.run(ask(kind))
        (completion,) = output.outputs
        assert output.finished and completion.finish_reason == "abort" and output.error is None
        assert 0 < len(completion.token_ids) < 400
    assert bench.run(is_idle_within(slow, 1))


def test_a_stop_string_also_ends_the_request_in_the_engine(bench, slow):
    async def ask(**params):
        params = SamplingParams(seed=1, ignore_eos=True, **params)
        output = await last(slow.generate("a", params, output_kind=FINAL))
        assert await is_idle_within(slow, 1)
        return output.outputs[0]

    whole = bench.run(ask(max_tokens=30))
    stop = next(char for char in whole.text[5:] if char.isascii())
    actual = bench.run(ask(max_tokens=400, stop=[stop]))
    assert actual.finish_reason == "stop" and actual.stop_reason == stop
    assert actual.text == whole.text.partition(stop)[0]


def test_a_request_can_be_aborted_while_its_prompt_is_tokenized(bench, slow, monkeypatch):
    encode = slow.tokenizer.encode

    def encode_slowly(text, **how):
        time.sleep(0.05)
        return encode(text[:10], **how)

    monkeypatch.setattr(slow.tokenizer, "encode", encode_slowly)

    async def ask():
        task = asyncio.create_task(last(slow.generate("x" * 2300, LONG, "a")))
        await asyncio.sleep(0.01)
        assert not task.done()
        await slow.abort("a")
        return await task

    output = bench.run(ask())
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == [] and len(output.prompt_token_ids) == 11
    assert bench.run(is_idle_within(slow, 1))


def test_an_unsent_abort_does_not_affect_other_requests(bench, slow, monkeypatch, caplog):
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    abort = slow.client.abort_requests

    async def fail(core_ids):
        raise MessageError("this message is not a message")

    async def ask():
        alone = await last(slow.generate("b", params, output_kind=FINAL))
        other = asyncio.create_task(last(slow.generate("b", params, output_kind=FINAL)))
        async for _ in slow.generate("a", LONG, "x"):
            monkeypatch.setattr(slow.client, "abort_requests", fail)
            break
        await slow.abort("unknown")
        after = await last(slow.generate("b", params, output_kind=FINAL))
        await slow.check_health()
        assert facts(await other) == facts(after) == facts(alone)

    def facts(output):
        return output.outputs[0].token_ids

    bench.run(ask())
    assert "could not be aborted: this message" in caplog.text
    bench.run(abort([f"x~{number}" for number in range(1000)]))
    assert bench.run(is_idle_within(slow, 2))


def test_the_id_of_an_aborted_request_can_be_reused_immediately(bench, slow):
    async def ask():
        params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
        alone = await last(slow.generate("b", params, "x", output_kind=FINAL))
        for _ in range(8):
            stream = slow.generate("a", LONG, "x")
            await anext(stream)
            await stream.aclose()
            # Tokens of the first request are still in transit.
            again = await last(slow.generate("b", params, "x", output_kind=FINAL))
            assert again.outputs == alone.outputs

    bench.run(ask())


def min_late(bench, ask):
    """Return output and delay of the fastest of three runs. A busy machine can delay a run."""
    for _ in range(3):
        output, late_s = bench.run(ask())
        if late_s < MAX_LATE_S:
            break
    return output, late_s


@pytest.mark.clock
@pytest.mark.parametrize("reads", [True, False], ids=["reads", "sleeps"])
def test_an_expired_timeout_ends_the_request(bench, slow, reads):
    async def ask():
        end_s = time.monotonic() + 0.3
        stream = slow.generate("a", LONG, timeout_s=0.3)
        await anext(stream)
        if reads:
            output = await last(stream)
        while not await slow.reset_prefix_cache():  # a reset is rejected while blocks are in use
            await asyncio.sleep(0.01)
        late_s = time.monotonic() - end_s
        return output if reads else await last(stream), late_s

    output, late_s = min_late(bench, ask)
    assert late_s < MAX_LATE_S
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert "timeout_s=0.3" in output.error
    assert 2 < len(output.outputs[0].token_ids) < 40


@pytest.mark.clock
def test_a_request_without_a_first_token_by_its_deadline_is_ended(bench, slow):
    async def ask():
        await slow.pause()
        end_s = time.monotonic() + 0.1
        output = await last(slow.generate({"prompt": "a", "deadline_s": 0.1}, LONG))
        assert await is_idle_within(slow, 1)
        late_s = time.monotonic() - end_s
        await slow.resume()
        return output, late_s

    output, late_s = min_late(bench, ask)
    assert 0 <= late_s < MAX_LATE_S
    assert output.outputs[0].finish_reason == "abort" and "deadline_s" in output.error
    assert output.outputs[0].token_ids == []


def test_a_request_that_meets_its_deadline_is_not_affected(bench, slow):
    async def ask():
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        start_s = time.monotonic()
        output = await last(slow.generate({"prompt": "a", "deadline_s": 0.3}, params, timeout_s=10))
        assert time.monotonic() - start_s > 0.3  # the deadline applies to the first token
        return output

    output = bench.run(ask())
    assert output.outputs[0].finish_reason == "length" and output.error is None


@pytest.mark.costly
def test_canceling_ten_thousand_callers_at_random_moments_frees_all_blocks(bench, llm):
    rng = Random(SEED)
    ways = [rng.randrange(4) for _ in range(NUM_ABORTS)]

    async def ask(number, way):
        params = SamplingParams(max_tokens=200, n=1 + (number % 50 == 0), ignore_eos=True)
        stream = llm.generate("say", params, f"r{number}")
        task = asyncio.create_task(last(stream))
        await asyncio.sleep(rng.random() * 0.02 if way else 0)
        if way == 3:
            await llm.abort(f"r{number}")
            return (await task).finished
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return True

    async def ask_all():
        for first in range(0, NUM_ABORTS, 500):
            pending = (ask(n, ways[n]) for n in range(first, first + 500))
            assert all(await asyncio.gather(*pending))
        start_s = time.monotonic()
        assert llm.num_unfinished == 0
        assert await is_idle_within(llm, 1)
        freed_s = time.monotonic() - start_s
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        fresh = await asyncio.gather(*(last(llm.generate("say", params)) for _ in range(100)))
        return freed_s, fresh

    freed_s, fresh = bench.run(ask_all(), timeout_s=60)
    print(f"all blocks free after {1000 * freed_s:.0f} ms")
    assert {out.outputs[0].finish_reason for out in fresh} == {"length"}
    assert {len(out.outputs[0].token_ids) for out in fresh} == {5}


@pytest.mark.costly
def test_statistics_are_up_to_date_when_no_request_runs(bench, slow):
    async def ask():
        streams = [slow.generate("a", LONG) for _ in range(3)]
        await asyncio.gather(*map(anext, streams))
        for stream in streams:
            await stream.aclose()
        await counts_become(slow, 0, 0, 0)
        await slow.pause()
        waiting = [asyncio.create_task(last(slow.generate("b", LONG, str(n)))) for n in range(2)]
        await counts_become(slow, 0, 2, 0)
        await slow.abort(["0", "1"])
        await asyncio.gather(*waiting)
        await counts_become(slow, 0, 0, 0)
        await slow.resume()
        await last(slow.generate("a", SamplingParams(max_tokens=3)))
        await counts_become(slow, 0, 0, 0)

    bench.run(ask())

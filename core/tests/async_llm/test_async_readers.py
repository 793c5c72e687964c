"""Slow readers and large outputs delay neither other readers nor the event loop."""

import asyncio
import gc
import time
from array import array
from random import Random

import pytest

from dovetail import SamplingParams
from dovetail.engine.output.output_chunks import cut_logprobs, cut_outputs
from dovetail.engine.streaming import request_streamer
from dovetail.engine.streaming.output_stream import OutputStream
from dovetail.errors import EngineDeadError
from dovetail.interfaces import EngineCoreOutputs, Finished
from dovetail.outputs import RequestMetrics, RequestOutput, RequestOutputKind
from dovetail.request import FinishReason
from dovetail.result import LogprobColumns

SEED = 20261121
NUM_STREAMS = 64
NUM_TRIES = 3
MAX_HOLD_S = 0.05
DELTA = RequestOutputKind.DELTA


async def collect(stream):
    return [output async for output in stream]


def text_of(outputs):
    return "".join(done.text for output in outputs for done in output.outputs)


# --- slow readers -----------------------------------------------------------------------------


def test_a_slow_reader_gets_all_new_tokens_in_one_output(bench, llm):
    params = SamplingParams(max_tokens=100, seed=3, ignore_eos=True)

    async def ask():
        (whole,) = await collect(llm.generate("a", params, output_kind=RequestOutputKind(2)))
        stream = llm.generate("a", params, output_kind=DELTA)
        actual = [await anext(stream)]
        while llm.num_unfinished:
            await asyncio.sleep(0.01)
        return whole, actual + await collect(stream)

    whole, (first, rest) = bench.run(ask())
    assert not first.finished and rest.finished
    assert len(first.outputs[0].token_ids) + len(rest.outputs[0].token_ids) == 100
    assert text_of([first, rest]) == whole.outputs[0].text
    assert rest.outputs[0].finish_reason == "length"


@pytest.mark.costly
def test_a_reader_that_stops_reading_does_not_delay_other_requests(bench):
    starting = bench.start(worker_config={"step_s": 0.002}, max_num_seqs=32)
    params = SamplingParams(max_tokens=150, seed=3, ignore_eos=True)

    async def ask():
        sleepers = [starting.generate("a", params, output_kind=DELTA) for _ in range(20)]
        for stream in sleepers:
            await anext(stream)
        outputs = await collect(starting.generate("a", params, output_kind=DELTA))
        late = await asyncio.gather(*map(collect, sleepers))
        return outputs, late

    outputs, late = bench.run(ask())
    assert len(outputs) > 75, "a fast reader receives an output per step"
    assert all(len(actual) <= 3 for actual in late)
    assert {len(text_of(actual)) > 0 and actual[-1].finished for actual in late} == {True}
    starting.shutdown()


# --- heavy outputs ----------------------------------------------------------------------------


@pytest.fixture
def no_collector():
    """Disable the garbage collector, because all objects of pytest add to its CPU time."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def longest_hold_s(work):
    """Return the result of `work` and the CPU time of the longest event-loop iteration, in s."""
    task, longest, mark = asyncio.ensure_future(work), 0.0, time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, mark = max(longest, now - mark), now
    return await task, longest


@pytest.fixture(scope="module")
def wide(bench):
    """An engine that runs 64 requests at a time without chunked prefill."""
    return bench.start(max_num_seqs=NUM_STREAMS, max_num_batched_tokens=NUM_STREAMS * 512)


@pytest.mark.clock
def test_many_streams_do_not_block_the_event_loop(bench, wide, no_collector):
    params = SamplingParams(max_tokens=60, logprobs=5, ignore_eos=True, stop=["\x00\x00\x00"])

    async def ask():
        pending = (wide.generate("say", params, output_kind=DELTA) for _ in range(NUM_STREAMS))
        return await asyncio.gather(*map(collect, pending))

    actual, longest_s = bench.run(longest_hold_s(ask()))
    print(f"{NUM_STREAMS} streams blocked the loop for {1000 * longest_s:.1f} ms at most")
    assert all(outputs[-1].finished for outputs in actual)
    assert longest_s < MAX_HOLD_S


@pytest.mark.clock
@pytest.mark.parametrize("sliced", [True, False])
def test_many_log_probabilities_do_not_block_the_event_loop(
    bench, wide, no_collector, monkeypatch, sliced
):
    """A chunk takes 1 ms. An iteration that processed all chunks of a step would take 50 ms."""
    process = wide._front.outputs.process_chunk

    def process_slowly(chunk):
        start = time.thread_time()
        while time.thread_time() - start < 0.001:
            pass
        return process(chunk)

    monkeypatch.setattr(wide._front.outputs, "process_chunk", process_slowly)
    if not sliced:
        monkeypatch.setattr(request_streamer, "SLICE_NS", 1 << 60)
    params = SamplingParams(max_tokens=2, prompt_logprobs=20, detokenize=False)
    rng = Random(SEED)
    prompts = [[rng.randrange(256) for _ in range(400)] for _ in range(32)]

    async def ask():
        assert await wide.reset_prefix_cache()
        await wide.pause()
        work = asyncio.gather(*(collect(wide.generate(prompt, params)) for prompt in prompts))
        await asyncio.sleep(0.05)
        await wide.resume()
        return await work

    holds_s = []
    for _ in range(NUM_TRIES if sliced else 1):  # other processes can only increase the time
        actual, longest_s = bench.run(longest_hold_s(ask()))
        assert [len(outputs[-1].prompt_logprobs) for outputs in actual] == [400] * 32
        holds_s.append(longest_s)
    min_s = min(holds_s)
    print(f"sliced={sliced}: the loop was blocked for {1000 * min_s:.1f} ms at most")
    assert (min_s < MAX_HOLD_S) == sliced, "without slices the loop must be blocked"


def test_a_long_text_is_tokenized_in_another_thread(bench, llm, monkeypatch):
    ticks, encode = [], llm.tokenizer.encode

    def encode_slowly(text, **how):
        time.sleep(0.2)
        return encode(text[:3], **how)

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def ask():
        task = asyncio.create_task(tick())
        outputs = await collect(llm.generate("x" * 2300, SamplingParams(max_tokens=2)))
        task.cancel()
        return outputs[-1]

    monkeypatch.setattr(llm.tokenizer, "encode", encode_slowly)
    output = bench.run(ask())
    assert output.prompt == "x" * 2300 and output.prompt_token_ids == [256, *b"xxx"]
    assert len(ticks) > 5


# --- output chunks ----------------------------------------------------------------------------


def columns(rng, num_positions, maximum):
    counts = array("i", [rng.randint(1, maximum) for _ in range(num_positions)])
    num = sum(counts)
    return LogprobColumns(
        counts=counts,
        token_ids=array("i", [rng.randrange(100) for _ in range(num)]),
        logprobs=array("f", [-rng.random() for _ in range(num)]),
        ranks=array("i", [rng.randint(1, 9) for _ in range(num_positions)]),
    )


def random_outputs(rng):
    names = [f"r{n}" for n in range(rng.randint(0, 40))]
    counts = array("i", [rng.choice((0, 1, 1, 1, 4)) for _ in names])
    endings = [name for name in [*names, "x", "y", "z"] if rng.random() < 0.3]
    return EngineCoreOutputs(
        request_ids=names,
        num_new_tokens=counts,
        token_ids=array("i", [rng.randrange(100) for _ in range(sum(counts))]),
        finished=tuple(Finished(request_id=n, reason=FinishReason.STOP) for n in endings),
        logprobs={n: columns(rng, c, 8) for n, c in zip(names, counts, strict=True) if c == 4},
        prompt_logprobs={n: columns(rng, rng.randint(1, 90), 5) for n in names[:3]},
        num_cached_tokens={n: rng.randrange(9) for n in names[:5]},
    )


def data_of(pieces):
    """Return all data of the outputs by request, in order, and the finish reasons."""
    tokens, ends, prompts, cached, logprobs = [], [], {}, {}, {}
    for piece in pieces:
        end = 0
        for name, count in zip(piece.request_ids, piece.num_new_tokens, strict=True):
            tokens.append((name, list(piece.token_ids[end : end + count])))
            end += count
        assert end == len(piece.token_ids)
        ends += [item.request_id for item in piece.finished]
        logprobs |= piece.logprobs
        cached |= piece.num_cached_tokens
        for name, prompt_logprob in piece.prompt_logprobs.items():
            entries = zip(prompt_logprob.token_ids, prompt_logprob.logprobs, strict=True)
            entries_of_request = prompts.setdefault(name, [])
            for count, rank in zip(prompt_logprob.counts, prompt_logprob.ranks, strict=True):
                entries_of_request.append((rank, [next(entries) for _ in range(count)]))
            assert next(entries, None) is None
    return tokens, sorted(ends), prompts, cached, logprobs


@pytest.mark.parametrize("maximum", [1, 16, 50, 10_000])
def test_output_chunks_contain_the_same_data_as_the_complete_outputs(maximum):
    rng = Random(SEED + maximum)
    for _ in range(60):
        outputs = random_outputs(rng)
        pieces = list(cut_outputs(outputs, maximum))
        assert data_of(pieces) == data_of([outputs])
        rows = {name: n for n, piece in enumerate(pieces) for name in piece.request_ids}
        for number, piece in enumerate(pieces):
            for item in piece.finished:  # no later chunk has tokens of the request
                assert rows.get(item.request_id, number) == number
            with_tokens = sum(count > 0 for count in piece.num_new_tokens)
            assert len(pieces) == 1 or with_tokens <= maximum
    assert list(cut_outputs(EngineCoreOutputs(), 10)) == [EngineCoreOutputs()]


def test_log_probabilities_are_split_into_chunks_of_limited_size():
    few, many = columns(Random(SEED), 300, 9), columns(Random(SEED), 300, 99)
    for whole, least_pieces in ((few, 300 / 32), (many, len(many.token_ids) / 16 / 32)):
        pieces = list(cut_logprobs(whole, 32))
        work = [len(piece.counts) + len(piece.token_ids) // 16 for piece in pieces]
        assert max(work) <= 32
        assert least_pieces <= len(pieces) <= sum(work) / (32 - 9) + 1
    whole = few
    assert list(cut_logprobs(columns(Random(1), 0, 9), 32)) == []
    (alone,) = cut_logprobs(whole.first(1), 0)
    assert alone == whole.first(1)


# --- request streams --------------------------------------------------------------------------


def output(finished):
    metrics = RequestMetrics(arrival_ns=1)
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[],
        outputs=[],
        finished=finished,
        metrics=metrics,
    )


def test_a_reader_gets_all_outputs_before_the_error():
    async def read():
        stream = OutputStream(lambda: output(False))
        stream.notify()
        error = EngineDeadError("gone", digest="rows: 3")
        stream.fail(error)
        assert not (await stream.next()).finished
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="gone") as raised:
                await stream.next()
            assert raised.value.digest == "rows: 3" and str(raised.value) == str(error)
            assert raised.value is not error  # a shared exception would accumulate tracebacks

    asyncio.run(read())


@pytest.mark.costly
def test_a_canceled_reader_can_read_again():
    async def read():
        stream = OutputStream(lambda: output(True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.01)
        stream.notify()
        stream.notify()
        assert (await stream.next()).finished and stream.ended
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.next(), 0.01)

    asyncio.run(read())

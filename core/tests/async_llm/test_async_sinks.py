"""A sink takes the outputs of a request, so that the reader's task need not run for each one."""

import asyncio

import pytest

from dovetail import SamplingParams
from dovetail.errors import UserError
from dovetail.outputs import RequestOutputKind

NUM_TOKENS = 100
PARAMS = SamplingParams(max_tokens=NUM_TOKENS, seed=3, ignore_eos=True)


class Sink:
    """A sink that stores the outputs that it takes in a list."""

    def __init__(self, *, ready=True, error=None):
        self.ready, self.error = ready, error
        self.taken = []

    def is_ready(self):
        return self.ready

    def take(self, output):
        if self.error is not None:
            raise self.error
        self.taken.append(output)


async def collect(llm, sink=None):
    stream = (
        llm.generate("a", PARAMS, output_kind=RequestOutputKind.DELTA)
        if sink is None
        else llm.generate_to(sink, "a", PARAMS)
    )
    return [output async for output in stream]


def tokens_of(outputs):
    return [token for output in outputs for token in output.outputs[0].token_ids]


@pytest.fixture
def start_slow_engine(bench):
    return bench.start(worker_config={"step_s": 0.002})


def test_a_ready_output_sink_takes_all_outputs_except_the_last(bench, start_slow_engine):
    sink = Sink()
    (last,) = bench.run(collect(start_slow_engine, sink))
    assert last.finished
    assert not any(output.finished for output in sink.taken)
    assert tokens_of([*sink.taken, last]) == tokens_of(bench.run(collect(start_slow_engine)))


def test_a_reader_gets_all_outputs_if_its_output_sink_is_not_ready(bench, start_slow_engine):
    sink = Sink(ready=False)
    outputs = bench.run(collect(start_slow_engine, sink))
    assert not sink.taken
    assert len(tokens_of(outputs)) == NUM_TOKENS


def test_an_output_sink_takes_no_output_before_the_previous_output_is_processed(
    bench, start_slow_engine
):
    sink = Sink(ready=False)

    async def read():
        stream = start_slow_engine.generate_to(sink, "a", PARAMS)
        first = await anext(stream)
        sink.ready = True
        while start_slow_engine.num_unfinished:
            await asyncio.sleep(0.01)
        assert not sink.taken
        return [first, *[output async for output in stream]]

    assert len(tokens_of(bench.run(read()))) == NUM_TOKENS


@pytest.mark.costly
def test_an_error_of_an_output_sink_ends_only_its_own_request(bench, start_slow_engine):
    async def read():
        other = asyncio.create_task(collect(start_slow_engine))
        with pytest.raises(UserError, match="the sink of the request failed"):
            await collect(start_slow_engine, Sink(error=RuntimeError("full")))
        return await other

    assert len(tokens_of(bench.run(read()))) == NUM_TOKENS

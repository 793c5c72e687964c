"""One large request blocks the event loop and the engine loop only for a limited time.

The tests measure CPU time of the thread, which does not depend on other processes.
"""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from security.engines import AsyncFrontEnd, engine_options

from dovetail import SamplingParams
from dovetail.clock import ManualClock
from dovetail.engine.process.request_intake import INTAKE_NS, RequestIntake
from dovetail.errors import RequestError
from dovetail.outputs import RequestOutputKind
from dovetail.request import EngineCoreRequest
from dovetail.transport.wire_types import wire_request
from dovetail_devkit.fakes.worker import FakeWorker

VOCAB = 32_000
MAX_CPU_S = 0.05
"""CPU time that one request may add to one iteration of a loop."""


class Capable(FakeWorker):
    """A worker that accepts every parameter and ignores all of them."""

    provides = FakeWorker.provides | {"bad_words", "logit_bias", "allowed_token_ids"}


LARGE = {
    "n": ("abc", SamplingParams(n=1024, max_tokens=3, ignore_eos=True)),
    "bad words": (
        "abc",
        SamplingParams(bad_words=[f"w{index:030}" for index in range(4096)], max_tokens=2),
    ),
    "a text that is too long": ("word " * 2_000_000, SamplingParams(max_tokens=2)),
    "a text that fits": ("word " * 3_000, SamplingParams(max_tokens=2)),
    "a prompt of ids": ([5] * 16_000, SamplingParams(max_tokens=2)),
    "stop ids": ("abc", SamplingParams(stop_token_ids=list(range(10, VOCAB)), max_tokens=2)),
    "allowed ids": ("abc", SamplingParams(allowed_token_ids=list(range(VOCAB)), max_tokens=2)),
    "biases": ("abc", SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), 1.0), max_tokens=2)),
}


@pytest.fixture(scope="module")
def front_end(tmp_path_factory):
    config = {"vocab_size": VOCAB, "max_position_embeddings": 2**14 + 100}
    options = engine_options(
        tmp_path_factory.mktemp("model"), config=config, worker_cls=Capable, max_num_seqs=64
    )
    opened = AsyncFrontEnd(options | {"max_waiting": 10_000})
    yield opened
    opened.close()


async def longest_turn(work):
    """Return the maximum CPU time of this thread in one iteration of the loop."""
    turns = []

    async def watch():
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            turns.append(now - last)
            last = time.thread_time()

    watcher = asyncio.create_task(watch())
    gc.collect()
    gc.disable()  # a garbage collection depends on the heap of the whole test session
    try:
        await work
    finally:
        gc.enable()
        watcher.cancel()
    return max(turns)


CASES = [(case, RequestOutputKind.DELTA) for case in LARGE]
CASES += [("n", RequestOutputKind.CUMULATIVE), ("n", RequestOutputKind.FINAL_ONLY)]


@pytest.mark.costly
@pytest.mark.parametrize(
    ("case", "kind"), CASES, ids=lambda arguments: getattr(arguments, "name", arguments)
)
def test_a_large_request_blocks_the_event_loop_only_for_milliseconds(front_end, case, kind):
    prompt, params = LARGE[case]

    async def read(*arguments, **more):
        return [output async for output in front_end.llm.generate(*arguments, **more)]

    async def both():
        stream = read("the victim", SamplingParams(max_tokens=100, ignore_eos=True))
        victim = asyncio.create_task(stream)
        try:
            await read(prompt, params, output_kind=kind)
        except RequestError as error:
            assert error.parameter == "prompt" and case == "a text that is too long"
        assert len((await victim)[-1].outputs[0].token_ids) == 100

    async def leave_early():
        async for _ in front_end.llm.generate(prompt, params, output_kind=kind):
            break

    turn_s = front_end.loop.run_until_complete(longest_turn(both()))
    assert turn_s < MAX_CPU_S
    if case == "n":
        assert front_end.loop.run_until_complete(longest_turn(leave_early())) < MAX_CPU_S


@pytest.mark.clock
def test_many_small_requests_are_spread_over_event_loop_iterations(front_end):
    params = SamplingParams(max_tokens=1)

    async def send():
        return [output async for output in front_end.llm.generate("abc", params)][-1]

    async def send_all():
        return await asyncio.gather(*(send() for _ in range(1000)))

    assert front_end.loop.run_until_complete(longest_turn(send_all())) < MAX_CPU_S


class SlowCore:
    """An engine core that needs 3 ms per request."""

    def __init__(self, clock, busy):
        self.clock, self.busy, self.added = clock, busy, []

    def has_work(self):
        return self.busy

    def add_request(self, request):
        self.clock.advance(3_000_000)
        if request.request_id == "r5":
            raise RequestError("unused method", parameter="n")
        self.added.append(request.request_id)


def wire(index):
    request = EngineCoreRequest(
        request_id=f"r{index}",
        prompt_token_ids=(5,),
        sampling_params=SamplingParams(),
        max_tokens=1,
    )
    return request.request_id, wire_request(request)


@pytest.mark.parametrize(("busy", "turns"), [(True, 4), (False, 4)])
def test_simultaneous_requests_are_admitted_over_several_steps(busy, turns):
    clock = ManualClock(1)
    core = SlowCore(clock, busy)
    intake = RequestIntake(clock)
    intake.begin_time_slice()
    rejected, num_turns = [], 1
    requests = map(wire, range(10))
    intake.begin_batch(requests, core.add_request, rejected.append, holds_steps=not busy)
    intake.proceed()
    while intake.is_waiting:
        assert not rejected and intake.holds_steps is not busy
        intake.begin_time_slice()
        intake.proceed()
        num_turns += 1
    assert num_turns == turns
    assert core.added == [f"r{index}" for index in range(10) if index != 5]
    assert [list(item) for item in rejected] == [["r5"]]


@pytest.mark.costly
def test_the_engine_stops_admitting_requests_in_a_step_at_the_time_limit():
    clock = ManualClock(1)
    core = SlowCore(clock, True)
    intake = RequestIntake(clock)
    intake.begin_time_slice()
    count = 0
    while not intake.is_over:
        first = wire(100 + count)
        intake.begin_batch([first], core.add_request, lambda rejected: None, holds_steps=False)
        intake.proceed()
        count += 1
    assert count == -(-INTAKE_NS // 3_000_000)

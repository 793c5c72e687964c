"""The cost of a reader of the engine's steps, such as the live view of the server's web page."""

import statistics
import time

import msgspec
import pytest

from dovetail.clock import ManualClock
from dovetail.engine.core import EngineCore
from dovetail.engine.step_trace.recorder import EXPIRY_NS
from dovetail.engine.step_trace.records import MAX_STEPS, StepTrace
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.scheduling import Scheduler
from dovetail_devkit.executor.null_executor import NullExecutor
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_devkit.suites.scheduler import make_request

NUM_RUNNING = 256
STEPS_PER_S, READS_PER_S = 50, 2
MAX_SHARE = 0.01
NUM_PAIRS = 9


class BusyEngine:
    """An engine with a constant number of running requests, which finish one after another."""

    def __init__(self):
        limits = SchedulerLimits(
            max_num_seqs=NUM_RUNNING, max_num_batched_tokens=8192, max_model_len=4096
        )
        self.clock = ManualClock()
        context = SchedulerContext(
            limits=limits, kv_cache=make_kv_cache(num_blocks=8192, block_size=16), clock=self.clock
        )
        self.core = EngineCore(
            NullExecutor(),
            Scheduler(context),
            vocab_size=32000,
            max_model_len=4096,
            clock=self.clock,
        )
        self._num_added = 0
        self._last_read = 0

    def step(self):
        missing = NUM_RUNNING - self.core.scheduler.depth().num_running
        for number in range(self._num_added, self._num_added + missing):
            prompt = [number % 30_000, number // 30_000, 3]
            self.core.add_request(make_request(f"r{number}", prompt, max_tokens=50 + number % 300))
        self._num_added += missing
        self.core.step()
        self.clock.advance(1_000_000_000 // STEPS_PER_S)

    def read(self):
        """Read the steps, with the conversions in the engine's and the server's process."""
        message = msgspec.msgpack.encode(self.core.read_steps(self._last_read, MAX_STEPS))
        trace = msgspec.msgpack.decode(message, type=StepTrace)
        self._last_read = trace.num_steps
        msgspec.json.encode(trace)
        return len(trace.steps)

    def second_s(self, is_read):
        """Return the CPU time that the steps of one second need, in seconds."""
        num_steps = 0
        if is_read:
            self.read()  # starts the record
        begin_s = time.thread_time()
        for number in range(1, STEPS_PER_S + 1):
            self.step()
            if is_read and number % (STEPS_PER_S // READS_PER_S) == 0:
                num_steps += self.read()
        spent_s = time.thread_time() - begin_s
        assert num_steps == (STEPS_PER_S if is_read else 0)
        if is_read:
            self.clock.advance(EXPIRY_NS + 1)  # ends the record
        return spent_s


@pytest.mark.clock
def test_a_reader_costs_at_most_one_percent_of_a_core_at_256_running_requests(note):
    engine = BusyEngine()
    for _ in range(STEPS_PER_S):
        engine.step()
    rises = []
    for _ in range(NUM_PAIRS):
        without_s = engine.second_s(is_read=False)
        rises.append(engine.second_s(is_read=True) - without_s)
    share = statistics.median(rises)
    note(f"reader of the steps: {share:.2%} of a core at {NUM_RUNNING} running requests")
    assert share <= MAX_SHARE

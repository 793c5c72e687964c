"""The host cost of a step: a request with special features does not slow other requests."""

import statistics
import time
from array import array

import pytest

from dovetail.clock import MonotonicClock
from dovetail.engine.core import EngineCore
from dovetail.interfaces import SchedulerContext, SchedulerLimits
from dovetail.result import LogprobColumns
from dovetail.scheduling import Scheduler
from dovetail_devkit.executor.null_executor import NullExecutor
from dovetail_devkit.scheduler.random_programs import make_kv_cache
from dovetail_devkit.suites.scheduler import make_request

NUM_REQUESTS = 512
COLUMNS = LogprobColumns(
    counts=array("i", [6]),
    token_ids=array("i", range(6)),
    logprobs=array("f", [-1.0] * 6),
    ranks=array("i", [1]),
)


class LogprobExecutor(NullExecutor):
    """An executor that adds log-probabilities for the first requests of each step."""

    def __init__(self, num_runs):
        super().__init__()
        self.logprobs = dict.fromkeys(range(num_runs), COLUMNS)
        sample = self.worker.sample_tokens

        def sample_with_logprobs(grammar=None):
            plain = sample(grammar)
            if len(plain.num_sampled) >= num_runs:
                object.__setattr__(plain, "logprobs", self.logprobs)
            return plain

        self.worker.sample_tokens = sample_with_logprobs


def cost_of(executor=None, *, long_prompt=0):
    """Return the median thread CPU time of a decode step in nanoseconds."""
    limits = SchedulerLimits(
        max_num_seqs=NUM_REQUESTS + 1,
        max_num_batched_tokens=8192,
        max_model_len=16384,
        long_prefill_token_threshold=64,
    )
    cache = make_kv_cache(num_blocks=NUM_REQUESTS * 8 + 1024, block_size=16)
    context = SchedulerContext(limits=limits, kv_cache=cache, clock=MonotonicClock())
    core = EngineCore(
        executor or NullExecutor(), Scheduler(context), vocab_size=32000, max_model_len=16384
    )
    if long_prompt:
        core.add_request(make_request("long", range(long_prompt), max_tokens=4))
        core.step()
    for number in range(NUM_REQUESTS):
        core.add_request(make_request(f"r{number}", [number, 1, 2], max_tokens=90))
    for _ in range(8):
        core.step()
    taken = []
    for _ in range(60):
        begin = time.thread_time_ns()
        core.step()
        taken.append(time.thread_time_ns() - begin)
    assert core.scheduler.depth().num_running == NUM_REQUESTS + bool(long_prompt)
    return statistics.median(taken)


@pytest.mark.clock
@pytest.mark.parametrize(
    ("maximum", "special"),
    [
        (2.5, lambda: cost_of(LogprobExecutor(1))),
        (4.0, lambda: cost_of(LogprobExecutor(NUM_REQUESTS))),
        (3.0, lambda: cost_of(long_prompt=12_000)),
    ],
    ids=["one-with-logprobs", "all-with-logprobs", "long-prompt-ahead"],
)
def test_one_request_with_special_features_does_not_slow_other_requests(maximum, special):
    ratios = (special() / cost_of() for _ in range(3))
    assert any(ratio <= maximum for ratio in ratios)


def longest_step_ms(prompts, **limits):
    """Return the longest thread CPU time of a step while all `prompts` run to completion."""
    kwargs = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 140_000}
    context = SchedulerContext(
        limits=SchedulerLimits(**(kwargs | limits)),
        kv_cache=make_kv_cache(num_blocks=200_000, block_size=16),
        clock=MonotonicClock(),
    )
    core = EngineCore(NullExecutor(), Scheduler(context), vocab_size=32000, max_model_len=140_000)
    for number, prompt in enumerate(prompts):
        core.add_request(make_request(f"r{number}", prompt, max_tokens=2))
    longest = 0
    while core.has_work():
        begin = time.thread_time_ns()
        core.step()
        longest = max(longest, time.thread_time_ns() - begin)
    return longest / 1e6


@pytest.mark.clock
@pytest.mark.parametrize(
    ("prompts", "limits"),
    [
        ([array("i", range(2_000))] * 1024, {}),
        ([array("i", [index % 999 for index in range(130_000)])] * 40, {}),
        (
            [array("i", [first, *range(30_000)]) for first in range(60)],
            {"long_prefill_token_threshold": 1024, "max_num_batched_tokens": 65_536},
        ),
    ],
    ids=["copies", "long-copies", "long-prompts"],
)
def test_no_step_takes_more_than_50_ms(prompts, limits):
    assert any(longest_step_ms(prompts, **limits) < 50 for _ in range(3))

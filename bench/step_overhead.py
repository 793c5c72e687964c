"""Measure the host time of a step: `EngineCore.step()` with an executor that does nothing.

Method: N requests decode at the same time, with prefix caching and statistics. The executor
returns one token for every request that samples, from a prepared array. The wall time of `step`
(schedule, update, outputs) is measured while all requests run, including steps with new blocks: 32
warm-up steps, then steps up to 400. The script prints the median, 10th and 90th percentile.

Then the cost of events per request, as the difference to a plain step: a start and a finish (all
requests in the first and the last step), a full block (all in every 16th step), an abort (the call,
for one request in four), a preemption (the first step that preempts, with blocks for three requests
in four; median of three runs). Then a step with changing requests ("churn"): N running requests
with outputs of 32 to 400 tokens, so that in most steps a request starts, finishes or fills a block;
and a step in which one request ends and another one starts ("1 in 1 out"; the call of `add_request`
is not counted).

Last, steps with special features for one request or all, as thread CPU time, compared with a plain
step of the same run: log-probabilities for one and for all, a long prompt that was admitted before
the decoding requests, drafts, and a step with eight equal prompts.

    python bench/step_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from array import array
from collections.abc import Callable
from random import Random

from dovetail.clock import MonotonicClock
from dovetail.engine.core import EngineCore
from dovetail.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    SchedulerContext,
    SchedulerLimits,
)
from dovetail.request import EngineCoreRequest
from dovetail.result import LogprobColumns, ModelRunnerOutput
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.executor.null_executor import NullExecutor, NullWorker
from dovetail_sched_fcfs import FCFSScheduler

SIZES = (1, 16, 256, 1024)
NUM_STEPS = 400
NUM_WARM_UP = 32
PROMPT_LEN = 24
BLOCK_SIZE = 16
LENGTH = PROMPT_LEN + NUM_STEPS + 2
BLOCKS_EACH = -(-LENGTH // BLOCK_SIZE)
TARGETS_MS = {256: 0.15, 1024: 0.5}


def make_core(
    num_requests: int,
    *,
    num_blocks: int | None = None,
    worker: NullWorker | None = None,
    max_model_len: int = 2 * LENGTH,
    **limits: int,
) -> EngineCore:
    """Return an engine core for at most `num_requests`.

    num_blocks: None for as many as needed. worker: None for a worker that returns only tokens.
    limits: additional fields of `SchedulerLimits`.
    """
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=64, dtype="bfloat16")
    group = KVCacheGroup(layer_names=("layer",), spec=spec)
    num_blocks = num_blocks or num_requests * BLOCKS_EACH + 64
    scheduler = FCFSScheduler(
        SchedulerContext(
            limits=SchedulerLimits(
                max_num_seqs=num_requests,
                **{
                    "max_num_batched_tokens": max(2048, num_requests * PROMPT_LEN),
                    **limits,
                },
                max_model_len=max_model_len,
            ),
            kv_cache=KVCacheConfig(num_blocks=num_blocks, groups=(group,)),
            clock=MonotonicClock(),
        )
    )
    executor = NullExecutor()
    executor.worker = worker or executor.worker
    return EngineCore(executor, scheduler, vocab_size=32_000, max_model_len=max_model_len)


def add_request(core: EngineCore, number: int, max_tokens: int = NUM_STEPS) -> None:
    """Add a request with a unique prompt."""
    core.add_request(
        EngineCoreRequest(
            request_id=f"request-{number}",
            prompt_token_ids=[number % 31_000 + index for index in range(PROMPT_LEN)],
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            max_tokens=max_tokens,
            stop_token_ids=frozenset({2}),
        )
    )


def timed_step(core: EngineCore) -> float:
    """Run one step. Return its time in milliseconds."""
    begin = time.perf_counter()
    core.step()
    return (time.perf_counter() - begin) * 1e3


def begins_a_block(step: int) -> bool:
    """Return True if all requests write the first position of a block in this step."""
    return (PROMPT_LEN + step - 1) % BLOCK_SIZE == 0


def collect() -> None:
    """Run the garbage collector and disable it."""
    gc.collect()
    gc.freeze()


def measure(num_requests: int) -> dict[str, float]:
    """Return the milliseconds per step, and the microseconds per start, full block and finish."""
    core = make_core(num_requests)
    for number in range(num_requests):
        add_request(core, number)
    collect()
    steps = []
    while core.has_work():
        steps.append(timed_step(core))
    decodes = steps[NUM_WARM_UP : NUM_STEPS - 1]
    median, ordered = statistics.median(decodes), sorted(decodes)
    borders = [taken for index, taken in enumerate(decodes, NUM_WARM_UP) if begins_a_block(index)]
    each = 1e3 / num_requests
    return {
        "num_requests": num_requests,
        "median_ms": median,
        "p10_ms": ordered[len(ordered) // 10],
        "p90_ms": ordered[len(ordered) * 9 // 10],
        "join_us": max(0.0, steps[0] - median) * each,
        "block_us": max(0.0, statistics.median(borders) - median) * each,
        "finish_us": max(0.0, steps[NUM_STEPS - 1] - median) * each,
    }


def measure_aborts(num_requests: int) -> float:
    """Return the microseconds of one abort, if one request in four is aborted."""
    core = make_core(num_requests)
    for number in range(num_requests):
        add_request(core, number)
    for _ in range(NUM_WARM_UP):
        core.step()
    names = [f"request-{number}" for number in range(0, num_requests, 4)]
    collect()
    begin = time.perf_counter()
    core.abort_requests(names)
    return (time.perf_counter() - begin) / len(names) * 1e6


def measure_preemptions(num_requests: int) -> float:
    """Return the microseconds that a preemption adds to a step in which all requests start a block.

    Preemptions happen when requests need blocks, so steps with new blocks are compared.
    """
    core = make_core(num_requests, num_blocks=num_requests * BLOCKS_EACH * 3 // 4 + 1)
    for number in range(num_requests):
        add_request(core, number)
    collect()
    plain: list[float] = []
    for index in range(NUM_STEPS):
        begin = time.perf_counter()
        stats = core.step().stats
        taken = (time.perf_counter() - begin) * 1e6
        if stats is not None and stats.num_preemptions:
            return max(0.0, taken - statistics.median(plain)) / stats.num_preemptions
        if index >= NUM_WARM_UP and begins_a_block(index):
            plain.append(taken)
    raise RuntimeError("no request was preempted: there are too many blocks")


def measure_churn(num_requests: int) -> float:
    """Return the median milliseconds of a step with changing requests."""
    core, rng = make_core(num_requests), Random(0)
    for number in range(4 * num_requests):
        add_request(core, number, rng.randint(NUM_WARM_UP, NUM_STEPS))
    collect()
    steps = []
    while core.scheduler.depth().num_waiting:
        steps.append(timed_step(core))
    return statistics.median(steps[NUM_WARM_UP:])


def measure_turnover(num_requests: int) -> float:
    """Return the median milliseconds of a step in which one request ends and another one starts."""
    core = make_core(num_requests, num_blocks=num_requests * 3 * BLOCKS_EACH)
    maximum = min(num_requests, NUM_STEPS)
    for number in range(num_requests):
        add_request(core, number, number % maximum + 2)
    collect()
    steps = []
    for number in range(num_requests, num_requests + NUM_STEPS):
        add_request(core, number, maximum)
        steps.append(timed_step(core))
    return statistics.median(steps[NUM_WARM_UP:])


class LogprobWorker(NullWorker):
    """Returns prepared log-probabilities for the first `num_requests` requests that sample."""

    def __init__(self, num_requests: int) -> None:
        super().__init__()
        columns = LogprobColumns(
            counts=array("i", [6]),
            token_ids=array("i", range(6)),
            logprobs=array("f", [-1.0] * 6),
            ranks=array("i", [1]),
        )
        self._logprobs = dict.fromkeys(range(num_requests), columns)

    def sample_tokens(self, grammar: object = None) -> ModelRunnerOutput:
        """Return token 7 for each request that samples."""
        plain = super().sample_tokens()
        logprobs = self._logprobs if len(plain.num_sampled) >= len(self._logprobs) else {}
        return ModelRunnerOutput(
            step_id=plain.step_id,
            num_sampled=plain.num_sampled,
            token_ids=plain.token_ids,
            logprobs=logprobs,
        )


class DraftWorker(NullWorker):
    """Drafts `num_drafts` tokens for each request that samples, and never accepts one."""

    def __init__(self, num_drafts: int) -> None:
        super().__init__()
        self._num_drafts = num_drafts

    def sample_tokens(self, grammar: object = None) -> ModelRunnerOutput:
        """Return token 7 for each request that samples."""
        plain = super().sample_tokens()
        drafts = array("B", [self._num_drafts]) * len(plain.num_sampled)
        return ModelRunnerOutput(
            step_id=plain.step_id,
            num_sampled=plain.num_sampled,
            token_ids=plain.token_ids,
            num_drafts=drafts if self._num_drafts else array("B"),
        )


CHUNK = 64
LONG_PROMPT = CHUNK * (NUM_STEPS + 8)


def measure_cpu(core: EngineCore, num_requests: int) -> float:
    """Return the median thread CPU time of a step, in milliseconds, while all requests decode."""
    for number in range(num_requests):
        add_request(core, number)
    for _ in range(NUM_WARM_UP):
        core.step()
    collect()
    steps = []
    for _ in range(NUM_STEPS // 2):
        begin = time.thread_time_ns()
        core.step()
        steps.append((time.thread_time_ns() - begin) / 1e6)
    return statistics.median(steps)


def make_core_behind_prompt(num_requests: int) -> EngineCore:
    """Return a core that computes a long prompt in chunks. Later requests are admitted after it."""
    core = make_core(
        num_requests + 1,
        num_blocks=num_requests * BLOCKS_EACH + LONG_PROMPT // BLOCK_SIZE + 64,
        max_model_len=LONG_PROMPT + 8,
        long_prefill_token_threshold=CHUNK,
    )
    core.add_request(
        EngineCoreRequest(
            request_id="long",
            prompt_token_ids=[31_500] * LONG_PROMPT,
            sampling_params=SamplingParams(max_tokens=4),
            max_tokens=4,
        )
    )
    core.step()
    return core


def num_computed_of_equal(num_requests: int = 8, length: int = 2001) -> int:
    """Return the number of computed tokens for simultaneous equal prompts of `length` tokens."""
    num_blocks = num_requests * (length // BLOCK_SIZE + 2)
    core = make_core(
        num_requests, num_blocks=num_blocks, max_model_len=length + 8, max_num_batched_tokens=32768
    )
    for number in range(num_requests):
        core.add_request(
            EngineCoreRequest(
                request_id=f"request-{number}",
                prompt_token_ids=range(length),
                sampling_params=SamplingParams(max_tokens=1),
                max_tokens=1,
            )
        )
    total = 0
    while core.has_work():
        stats = core.step().stats
        total += stats.num_scheduled_tokens if stats else 0
    return total


SPECIAL: dict[str, tuple[float, Callable[[int], EngineCore]]] = {
    "plain": (0.13, make_core),
    "one with logprobs": (0.2, lambda size: make_core(size, worker=LogprobWorker(1))),
    "all with logprobs=5": (0.6, lambda size: make_core(size, worker=LogprobWorker(size))),
    "long prompt ahead": (0.3, make_core_behind_prompt),
    "lookahead 3, no drafts": (
        4.0,
        lambda size: make_core(
            size,
            worker=DraftWorker(0),
            num_lookahead_tokens=3,
        ),
    ),
    "lookahead 3, one draft each": (
        4.5,
        lambda size: make_core(
            size,
            worker=DraftWorker(1),
            num_lookahead_tokens=3,
        ),
    ),
}
"""The feature of the steps, the target in milliseconds, and the function that creates the core."""

COLUMNS = (
    ("requests", "num_requests", "8.0f"),
    ("median ms", "median_ms", "9.3f"),
    ("p10", "p10_ms", "6.3f"),
    ("p90", "p90_ms", "6.3f"),
    ("churn ms", "churn_ms", "8.3f"),
    ("1 in 1 out", "turnover_ms", "10.3f"),
    ("join µs", "join_us", "7.1f"),
    ("block µs", "block_us", "8.2f"),
    ("finish µs", "finish_us", "9.1f"),
    ("abort µs", "abort_us", "8.1f"),
    ("preempt µs", "preempt_us", "10.1f"),
)


def main() -> int:
    """Print the table. Return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    print(f"EngineCore.step() with a null executor, Python {platform.python_version()}")
    print("  ".join(title.rjust(int(style.split(".")[0])) for title, _, style in COLUMNS))
    rows: list[dict[str, float | str]] = []
    for size in SIZES:
        row = measure(size)
        row["abort_us"] = measure_aborts(size)
        preempt = [measure_preemptions(size) for _ in range(3)] if size > 1 else [0.0]
        row["preempt_us"] = statistics.median(preempt)
        row["churn_ms"] = measure_churn(size)
        row["turnover_ms"] = measure_turnover(size)
        rows.append(row)
        print("  ".join(format(row[key], style) for _, key, style in COLUMNS))
    print(f"\n1,024 requests, thread CPU time of a step\n{'case':28}  median ms  target")
    missed = False
    for name, (target, make) in SPECIAL.items():
        cpu_ms = measure_cpu(make(SIZES[-1]), SIZES[-1])
        missed |= cpu_ms > target
        rows.append({"case": name, "median_cpu_ms": cpu_ms})
        print(f"{name:28}  {cpu_ms:9.3f}  {target:6.2f}")
    computed = num_computed_of_equal()
    rows.append({"case": "8 equal prompts of 2,001", "num_computed_tokens": computed})
    print(f"8 equal prompts of 2,001 tokens: {computed} computed")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    for row in rows[: len(SIZES)]:
        target = TARGETS_MS.get(int(row["num_requests"]))
        if target is not None:
            reached = row["median_ms"] <= target
            missed |= not reached
            size, median = int(row["num_requests"]), row["median_ms"]
            print(f"{median:.3f} ms at {size} (target {target}): {reached}")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())

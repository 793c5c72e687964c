"""What a step costs the host: `EngineCore.step()` around an executor that does nothing.

Method: N requests decode side by side, prefix caching and statistics on. The executor answers every
sampling run with token 7, from an array made beforehand. Measured is the wall time of `step`
(schedule, update, outputs) once all requests run, block borders and all: 32 steps of warm-up, then
the steps up to 400; median, 10th and 90th percentile. Beside it: what the events cost (a join, a
finish), as the difference that they make to a step.

    python bench/step_overhead.py [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time

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
from dovetail.sampling_params import SamplingParams
from dovetail.testing.null_executor import NullExecutor
from dovetail_sched_fcfs import FCFSScheduler

SIZES = (1, 16, 256, 1024)
NUM_STEPS = 400
NUM_WARM_UP = 32
PROMPT_LEN = 24
BLOCK_SIZE = 16
TARGET_MS = 1.5
"""Of the first walking engine, at 1,024 running requests."""


def make_core(num_requests: int) -> EngineCore:
    """Return an engine core with room for `num_requests` and the steps of the measurement."""
    length = PROMPT_LEN + NUM_STEPS + 2
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=64, dtype="bfloat16")
    group = KVCacheGroup(layer_names=("layer",), spec=spec)
    num_blocks = num_requests * -(-length // BLOCK_SIZE) + 64
    scheduler = FCFSScheduler(
        SchedulerContext(
            limits=SchedulerLimits(
                max_num_seqs=num_requests,
                max_num_batched_tokens=max(2048, num_requests * PROMPT_LEN),
                max_model_len=2 * length,
            ),
            kv_cache=KVCacheConfig(num_blocks=num_blocks, groups=(group,)),
            clock=MonotonicClock(),
        )
    )
    return EngineCore(NullExecutor(), scheduler, vocab_size=32_000, max_model_len=2 * length)


def add_requests(core: EngineCore, num_requests: int) -> None:
    """Add requests with prompts of their own, all as long as the measurement."""
    params = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0)
    for number in range(num_requests):
        core.add_request(
            EngineCoreRequest(
                request_id=f"request-{number}",
                prompt_token_ids=[number % 31_000 + place for place in range(PROMPT_LEN)],
                sampling_params=params,
                max_tokens=NUM_STEPS,
                stop_token_ids=frozenset({2}),
            )
        )


def measure(num_requests: int) -> dict[str, float]:
    """Return milliseconds a step: median, p10, p90; and microseconds a join and a finish."""
    core = make_core(num_requests)
    add_requests(core, num_requests)
    seconds = []
    gc.collect()
    gc.freeze()
    while core.has_work():
        begin = time.perf_counter()
        core.step()
        seconds.append(time.perf_counter() - begin)
    decodes = sorted(seconds[NUM_WARM_UP : NUM_STEPS - 1])
    median = statistics.median(decodes)
    return {
        "num_requests": num_requests,
        "median_ms": median * 1e3,
        "p10_ms": decodes[len(decodes) // 10] * 1e3,
        "p90_ms": decodes[len(decodes) * 9 // 10] * 1e3,
        "join_us": max(0.0, seconds[0] - median) / num_requests * 1e6,
        "finish_us": max(0.0, seconds[NUM_STEPS - 1] - median) / num_requests * 1e6,
    }


def main() -> int:
    """Print the table; return 1 if the target at the largest size is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--json", help="write the figures to this file, too")
    arguments = parser.parse_args()
    print(f"EngineCore.step() with a null executor, Python {platform.python_version()}")
    print(
        f"{'requests':>9} {'median ms':>10} {'p10':>7} {'p90':>7} {'join µs':>8} {'finish µs':>10}"
    )
    rows = [measure(size) for size in SIZES]
    for row in rows:
        print(
            f"{row['num_requests']:>9.0f} {row['median_ms']:>10.3f} {row['p10_ms']:>7.3f} "
            f"{row['p90_ms']:>7.3f} {row['join_us']:>8.1f} {row['finish_us']:>10.1f}"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    reached = rows[-1]["median_ms"] <= TARGET_MS
    print(f"{rows[-1]['median_ms']:.3f} ms at {SIZES[-1]} (target {TARGET_MS}): {reached}")
    return not reached


if __name__ == "__main__":
    raise SystemExit(main())

"""Measure the cost of worker processes per step, and how much planning overlaps at depth 2.

Method: a scripted worker takes a fixed time per step (it sleeps, as a host that waits for a
device), and a scheduler takes a fixed extra time (it computes); N requests decode through the
engine core. Executors: `uniproc`, with the worker in this process, and `multiproc`, with a worker
process. Depth 1 is `EngineCore.step`, depth 2 `step_with_batch_queue`. A result is the time per
step from the first to the last result of 200 steps, after 30 warm-up steps; median, minimum and
maximum of the alternating repeats. Without overlap a step takes worker + scheduler + other work;
with full overlap, the longer of worker and scheduler + other work. The last line of each size is
the round trip of an empty operation to two workers.

    python bench/worker_processes.py [--rows 16] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dovetail.clock import MonotonicClock
from dovetail.engine.core import EngineCore
from dovetail.executors.multiproc.executor import MultiprocExecutor
from dovetail.executors.uniproc import UniprocExecutor
from dovetail.interfaces import (
    Executor,
    KVCacheConfig,
    KVCacheGroup,
    NoCacheSpec,
    SchedulerContext,
    SchedulerLimits,
)
from dovetail.plan import SchedulerOutput
from dovetail.request import EngineCoreRequest
from dovetail.sampling_params import SamplingParams
from dovetail_devkit.contexts import make_executor_context, write_fake_config
from dovetail_devkit.executor.null_executor import NullWorker
from dovetail_sched_fcfs import FCFSScheduler

NUM_STEPS = 200
NUM_WARM_UP = 30
NUM_CALLS = 1000
MAX_LEN = NUM_STEPS + NUM_WARM_UP + 40
CASES_MS = ((0.0, 0.0), (1.0, 1.0), (4.0, 1.0), (4.0, 4.0))
"""Milliseconds of the worker and of the scheduler in each measured step."""
EXECUTORS: dict[str, type[Executor]] = {"uniproc": UniprocExecutor, "multiproc": MultiprocExecutor}


class TimedWorker(NullWorker):
    """A worker that takes `step_ms` of its options for each step."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._step_s = context.options["step_ms"] / 1e3

    def execute_model(self, plan: SchedulerOutput) -> None:
        """Sleep for the time of a step, and store the plan."""
        if self._step_s:
            time.sleep(self._step_s)
        super().execute_model(plan)


class TimedScheduler(FCFSScheduler):
    """A scheduler that computes for `extra_s` longer in each step."""

    extra_s = 0.0

    def schedule(self) -> SchedulerOutput:
        """Plan, then compute for the extra time."""
        end = time.perf_counter() + self.extra_s
        plan = super().schedule()
        while time.perf_counter() < end:
            pass
        return plan


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured configuration."""

    executor: str
    ahead: bool
    worker_ms: float
    scheduler_ms: float
    num_rows: int

    def __str__(self) -> str:
        depth = 2 if self.ahead else 1
        return f"{self.executor:9} depth {depth}  {self.worker_ms:4.1f} {self.scheduler_ms:9.1f}"


def make_executor(case: Case, folder: Path, num_workers: int = 1) -> Executor:
    """Return an executor of timed workers."""
    import worker_processes  # so that a worker process finds the class

    context = make_executor_context(
        write_fake_config(folder),
        worker_processes.TimedWorker,
        async_scheduling=case.ahead,
        tensor_parallel_size=num_workers,
    )
    options = {"step_ms": case.worker_ms}
    return EXECUTORS[case.executor](replace(context, worker_options=options))


def make_core(case: Case, executor: Executor) -> EngineCore:
    """Return an engine core with `num_rows` requests that decode during the whole measurement."""
    group = KVCacheGroup(layer_names=("layer",), spec=NoCacheSpec(block_size=16))
    blocks_each = -(-MAX_LEN // 16)
    scheduler = TimedScheduler(
        SchedulerContext(
            limits=SchedulerLimits(
                max_num_seqs=case.num_rows, max_num_batched_tokens=8192, max_model_len=MAX_LEN
            ),
            kv_cache=KVCacheConfig(num_blocks=case.num_rows * blocks_each + 1, groups=(group,)),
            clock=MonotonicClock(),
        )
    )
    scheduler.extra_s = case.scheduler_ms / 1e3
    core = EngineCore(executor, scheduler, vocab_size=32_000, max_model_len=MAX_LEN)
    for number in range(case.num_rows):
        core.add_request(
            EngineCoreRequest(
                request_id=f"request-{number}",
                prompt_token_ids=[number % 31_000] * 8,
                sampling_params=SamplingParams(temperature=0.0),
                max_tokens=NUM_STEPS + NUM_WARM_UP + 4,
                stop_token_ids=frozenset({2}),
            )
        )
    return core


def measure(case: Case) -> float:
    """Return the milliseconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        executor = make_executor(case, Path(folder))
        try:
            core = make_core(case, executor)
            step = core.step_with_batch_queue if case.ahead else core.step
            advance(step, NUM_WARM_UP)
            begin = time.perf_counter()
            advance(step, NUM_STEPS)
            return (time.perf_counter() - begin) / NUM_STEPS * 1e3
        finally:
            executor.shutdown()


def advance(step: Callable[[], object], num_results: int) -> None:
    """Run steps until `num` results have arrived."""
    while num_results:
        num_results -= step() is not None


def measure_calls(num_rows: int) -> float:
    """Return the milliseconds of the round trip of an operation to two workers."""
    case = Case(executor="multiproc", ahead=False, worker_ms=0, scheduler_ms=0, num_rows=num_rows)
    with tempfile.TemporaryDirectory() as folder:
        executor = make_executor(case, Path(folder), num_workers=2)
        try:
            begin = time.perf_counter()
            for _ in range(NUM_CALLS):
                executor.collective_rpc("determine_available_memory")
            return (time.perf_counter() - begin) / NUM_CALLS * 1e3
        finally:
            executor.shutdown()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    cases = [
        Case(
            executor=executor,
            ahead=ahead,
            worker_ms=worker_ms,
            scheduler_ms=scheduler_ms,
            num_rows=arguments.rows,
        )
        for worker_ms, scheduler_ms in CASES_MS
        for executor in EXECUTORS
        for ahead in (False, True)
    ]
    taken: dict[Case, list[float]] = {case: [] for case in cases}
    for _ in range(arguments.repeats):
        for case in cases:
            taken[case].append(measure(case))
    calls = [measure_calls(arguments.rows) for _ in range(arguments.repeats)]
    print(f"{arguments.rows} rows, Python {platform.python_version()}, {os.cpu_count()} processors")
    print("executor           worker scheduler  ms per step (min to max)")
    for case, all_ms in taken.items():
        print(f"{case}  {statistics.median(all_ms):9.3f} ({min(all_ms):.3f} to {max(all_ms):.3f})")
    print(f"operation, two workers   {statistics.median(calls):.3f} ms")
    if arguments.json:
        rows = [vars(case) | {"ms": all_ms} for case, all_ms in taken.items()]
        Path(arguments.json).write_text(json.dumps({"steps": rows, "calls_ms": calls}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

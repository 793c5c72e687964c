"""Measure the front-end CPU time per token: text, outputs, log-probabilities and whole streams.

Method. Part one passes the columns of synthetic steps, one new token for each of N requests, to
`OutputProcessor.process`, which creates the outputs; tokens are taken from real text with the demo
model's tokenizer (byte-level BPE, 2,048 entries). After 16 warm-up steps, 100 steps are measured in
CPU time of the thread; the result is the median step divided by N. FINAL_ONLY includes the step
that ends all requests, divided among its tokens. The cost of adding a request is the median of 200
calls of `FrontEnd`: validation, the engine's request, and the state of the completion.

Part two runs `AsyncLLM` with N readers over an engine process with a worker that responds
immediately, and divides the CPU time of this process by the number of tokens: the whole front end,
including the thread that reads messages. The result is the median of three runs.

    python bench/front_end.py [--requests N] [--repeats R] [--json FILE] [--no-streams]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from random import Random

from dovetail import AsyncLLM
from dovetail.clock import MonotonicClock
from dovetail.config import EngineArgs
from dovetail.engine.input.input_processor import InputFacts, InputProcessor
from dovetail.engine.output.output_processor import OutputProcessor
from dovetail.interfaces import EngineCoreOutputs, Finished
from dovetail.outputs import RequestOutputKind
from dovetail.request import FinishReason
from dovetail.result import LogprobColumns
from dovetail.sampling_params import SamplingParams
from dovetail.scheduling import Scheduler
from dovetail.tokenizers.huggingface import HuggingFaceTokenizer
from dovetail_devkit.executor.null_executor import NullWorker
from dovetail_devkit.fakes.platform import FakePlatform

DEMO = Path(__file__).parents[1] / "plugins/demo_model/src/dovetail_demo_model/model"
NUM_WARM_UP = 16
NUM_STEPS = 100
NUM_ADDED = 200
STREAM_TOKENS = 100
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TARGETS_US = {
    "FINAL_ONLY": 0.4,
    "DELTA": 3.0,
    "DELTA, prompt of 4,096": 3.0,
    "DELTA, one stop string": 5.0,
    "DELTA, logprobs=5": 12.0,
    "streams": 7.0,
}


class Harness:
    """The processors of a front end without an engine.

    token_ids: tokens of a text to sample from.
    """

    def __init__(self) -> None:
        self.tokenizer = HuggingFaceTokenizer.from_directory(DEMO)
        self.clock = MonotonicClock()
        info = InputFacts(
            vocab_size=self.tokenizer.vocab_size, max_model_len=1 << 16, eos_token_ids=frozenset()
        )
        self.inputs = InputProcessor(info, tokenizer=self.tokenizer, clock=self.clock)
        text = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
        self.token_ids = self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, length: int) -> list[int]:
        """Return a prompt of `num` tokens."""
        return (self.token_ids * (1 + length // len(self.token_ids)))[:length]

    def columns(self, num: int, seed: int) -> array[int]:
        """Return one token for each of `num` requests."""
        rng = Random(seed)
        return array("i", [rng.choice(self.token_ids) for _ in range(num)])


def step_cost_us(
    harness: Harness, num: int, kind: RequestOutputKind, prompt_len: int = 100, **params: object
) -> float:
    """Return the median CPU time per token in microseconds, over steps of `num` tokens."""
    processor = OutputProcessor(harness.tokenizer, clock=harness.clock)
    ids = [f"r{number}" for number in range(num)]
    merged = SamplingParams(max_tokens=1 << 14, ignore_eos=True, **params)  # type: ignore[arg-type]
    for name in ids:
        prompt = harness.prompt(prompt_len)
        processor.add_request(name, harness.inputs.process(name, prompt, merged), kind=kind)
    times = []
    counts = array("i", [1]) * num
    gc.collect()
    for number in range(NUM_WARM_UP + NUM_STEPS):
        tokens = harness.columns(num, number)
        logprobs = _logprobs(ids, tokens) if merged.logprobs is not None else {}
        step = EngineCoreOutputs(
            request_ids=ids, num_new_tokens=counts, token_ids=tokens, logprobs=logprobs
        )
        start_ns = time.thread_time_ns()
        processed = processor.process(step)
        times.append(time.thread_time_ns() - start_ns)
        assert len(processed.request_outputs) == (0 if kind is FINAL_ONLY else num)
        del processed
    end = EngineCoreOutputs(
        finished=tuple(Finished(request_id=name, reason=FinishReason.LENGTH) for name in ids)
    )
    start_ns = time.thread_time_ns()
    assert len(processor.process(end).request_outputs) == num
    last = (time.thread_time_ns() - start_ns) / (NUM_WARM_UP + NUM_STEPS)
    per_step = statistics.median(times[NUM_WARM_UP:])
    return (per_step + (last if kind is FINAL_ONLY else 0)) / num / 1000


def _logprobs(ids: list[str], tokens: array[int]) -> dict[str, LogprobColumns]:
    """Return six log-probabilities per token: those of the token and of five neighboring ids."""
    return {
        name: LogprobColumns(
            counts=array("i", [6]),
            token_ids=array("i", [token, *(max(0, token - 2) + index for index in range(5))]),
            logprobs=array("f", [-1.5, -0.5, -1.0, -1.5, -2.0, -2.5]),
            ranks=array("i", [3]),
        )
        for name, token in zip(ids, tokens, strict=True)
    }


def adding_cost_us(harness: Harness, prompt_len: int) -> float:
    """Return the median CPU time of adding a request, in microseconds."""
    processor = OutputProcessor(harness.tokenizer, clock=harness.clock)
    prompt, params, times = harness.prompt(prompt_len), SamplingParams(max_tokens=100), []
    for number in range(NUM_ADDED):
        start_ns = time.thread_time_ns()
        requests = harness.inputs.process(f"r{number}", prompt, params)
        processor.add_request(f"r{number}", requests, kind=DELTA)
        times.append(time.thread_time_ns() - start_ns)
    return statistics.median(times) / 1000


def streams_cost_us(num: int, kind: RequestOutputKind) -> tuple[float, float]:
    """Return the CPU time per token in microseconds, and tokens per second, for `num` readers."""
    args = EngineArgs(
        model=DEMO,
        platform=FakePlatform,
        worker_cls=NullWorker,
        scheduler_cls=Scheduler,
        max_num_seqs=num,
        max_num_batched_tokens=num * 8,
    )
    llm = AsyncLLM.from_engine_args(args)
    params = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)

    async def read(number: int) -> int:
        prompt = {"prompt_token_ids": [5 + number % 50, 6, 7, 8]}
        count = 0
        async for output in llm.generate(prompt, params, output_kind=kind):
            count += len(output.outputs[0].token_ids)
        return count

    async def run() -> tuple[float, float]:
        start, cpu = time.perf_counter(), time.process_time()
        counts = await asyncio.gather(*(read(number) for number in range(num)))
        assert sum(counts) == num * STREAM_TOKENS
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        return cpu * 1e6 / sum(counts), sum(counts) / took

    try:
        return asyncio.run(run())
    finally:
        llm.shutdown()


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-streams", action="store_true")
    args = parser.parse_args()
    harness, num = Harness(), args.requests
    cases: dict[str, Callable[[], float]] = {
        "FINAL_ONLY": lambda: step_cost_us(harness, num, FINAL_ONLY),
        "DELTA": lambda: step_cost_us(harness, num, DELTA),
        "DELTA, prompt of 4,096": lambda: step_cost_us(harness, num, DELTA, 4096),
        "DELTA, one stop string": lambda: step_cost_us(harness, num, DELTA, stop=["\n\nHuman:"]),
        "DELTA, logprobs=5": lambda: step_cost_us(harness, num, DELTA, logprobs=5),
        "add a request of 100": lambda: adding_cost_us(harness, 100),
        "add a request of 32,000": lambda: adding_cost_us(harness, 32_000),
    }
    if not args.no_streams:
        cases["streams"] = lambda: streams_cost_us(num, DELTA)[0]
    result = {}
    print(f"{num} requests; µs of CPU time per token (per request, for adding)")
    for name, measure in cases.items():
        values = sorted(measure() for _ in range(args.repeats))
        result[name] = {"median": statistics.median(values), "least": values[0], "most": values[-1]}
        target = f"   target {TARGETS_US[name]:g}" if name in TARGETS_US else ""
        spread = f"({values[0]:.2f} to {values[-1]:.2f})"
        print(f"  {name:26} {result[name]['median']:9.2f} {spread:20}{target}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

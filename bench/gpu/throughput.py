"""Measures the throughput of a model shape, and the host time of a step of 256 requests.

The model has random weights from the `dummy` loader in bf16. Requests have random prompts of 128
tokens and 256 output tokens, greedy, without a prefix cache. Metrics are the median of three runs
for one request and of two runs for 256 requests, each after a short warm-up of the same kind. The
host time of a step excludes the time that the host waits for results; the launch time is the part
that the worker uses.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail import LLM, SamplingParams
from dovetail.plugins import PluginRegistry
from dovetail.result import ModelRunnerOutput
from gpu.catalog import H200_COPY_GB_S
from gpu.engine_runs import random_prompts
from gpu.report import Report, Task
from gpu.sections.probes import memory_rates
from gpu.shapes import num_read_bytes, write_shape

_NUM_IN, _NUM_OUT, _NUM_MANY = 128, 256, 256
_SMALL = (8, 8, 4)
_NUM_WARM = 16


@dataclass(kw_only=True)
class Times:
    """Seconds of the worker's calls: the launch of each step, and the total wait for results."""

    launches: list[float] = field(default_factory=list)
    waited: float = 0.0


def measure_shape(name: str, task: Task, report: Report) -> None:
    """Measure a model of the shape `name`.

    Report its startup time, the throughput of one and of many requests, and the host times.
    """
    num_in, num_out, num_many = _SMALL if task.small else (_NUM_IN, _NUM_OUT, _NUM_MANY)
    model = write_shape("tiny" if task.small else name, task.folder)
    report.note(f"{num_in} tokens in, {num_out} out; {num_many} requests at once")
    copy_gb_s, read_gb_s = memory_rates(task)
    times = Times()
    start = time.perf_counter()
    with LLM(
        str(model),
        **{**task.parts.options, "worker_cls": timed_worker(task, times)},
        load_format="dummy",
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        enable_prefix_caching=False,
        max_model_len=num_in + num_out,
        max_num_seqs=num_many,
        max_num_batched_tokens=8192,
        # Enough memory for all requests; the default share of a CPU's memory would be too large.
        num_gpu_blocks_override=num_many * (num_in + num_out) // 16 + 64,
        block_size=16,
    ) as llm:
        report.metric("load_s", time.perf_counter() - start)
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True)
        rates = _rates(llm, [num_in], params, task.seed, 1 if task.small else 3)
        report.metric("one", statistics.median(rates), note=_spread(rates))
        many = _rates(llm, [num_in] * num_many, params, task.seed, 1 if task.small else 2)
        report.metric("many", statistics.median(many), note=_spread(many))
        if task.device != "cpu":
            _report_host(llm, [num_in] * num_many, params, task, times, report)
    one, scale = statistics.median(rates), H200_COPY_GB_S / copy_gb_s
    if name == "qwen3-0.6b":
        report.metric("one_h200", one * scale)
        report.metric("many_h200", statistics.median(many) * scale)
    else:
        gb_s = one * num_read_bytes(name) / 1e9
        report.metric("read_share", 100 * gb_s / read_gb_s, note=f"{gb_s:,.0f} GB/s")


def _rates(
    llm: LLM, lengths: list[int], params: SamplingParams, seed: int, repeats: int
) -> list[float]:
    """Return the output tokens per second of each run, after a warm-up."""
    warm_up = replace(params, max_tokens=min(_NUM_WARM, params.max_tokens or _NUM_WARM))
    _run(llm, lengths, warm_up, seed - 1)
    return [_run(llm, lengths, params, seed + repeat) for repeat in range(repeats)]


def _run(llm: LLM, lengths: list[int], params: SamplingParams, seed: int) -> float:
    prompts = random_prompts(lengths, vocab_size=1000, seed=seed)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if tokens != len(lengths) * (params.max_tokens or 0):
        raise RuntimeError(
            f"{tokens} tokens generated instead of {len(lengths)} × {params.max_tokens}"
        )
    return tokens / seconds


def _report_host(
    llm: LLM,
    lengths: list[int],
    params: SamplingParams,
    task: Task,
    times: Times,
    report: Report,
) -> None:
    """Report the host times of the decode steps of one more run, and their number."""
    prompts = random_prompts(lengths, vocab_size=1000, seed=task.seed + 9)
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(f"host-{number}", prompt, params)
    num_prefill = -(-len(prompts) * len(prompts[0]) // 8192) + 2
    for _ in range(num_prefill):
        engine.step()
    times.launches.clear()
    times.waited = 0.0
    start, steps = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
    busy = time.perf_counter() - start - times.waited
    report.metric("launch_ms", 1e3 * statistics.median(times.launches))
    report.metric("host_ms", 1e3 * busy / steps, note=f"mean of {steps} steps")


def _spread(rates: list[float]) -> str:
    return f"{min(rates):,.0f} to {max(rates):,.0f}"


class _TimedHandle:
    """A step handle that measures its waiting time."""

    def __init__(self, handle: Any, times: Times) -> None:
        self._handle, self._times = handle, times

    def done(self) -> bool:
        return bool(self._handle.done())

    def result(self, timeout: float | None = None) -> Any:
        start = time.perf_counter()
        try:
            return self._handle.result(timeout)
        finally:
            self._times.waited += time.perf_counter() - start


def timed_worker(task: Task, times: Times) -> type:
    """Return a worker class of the device that records the time of its calls in `times`."""
    base = PluginRegistry().load("worker", task.parts.worker)

    class TimedWorker(base):
        """The worker with time measurement."""

        def execute_model(self, plan: Any) -> None:
            self._begun = time.perf_counter()
            super().execute_model(plan)

        def sample_tokens(self, grammar: Any = None) -> Any:
            result = super().sample_tokens(grammar)
            times.launches.append(time.perf_counter() - self._begun)
            is_there = isinstance(result, ModelRunnerOutput)
            return result if is_there else _TimedHandle(result, times)

    return TimedWorker

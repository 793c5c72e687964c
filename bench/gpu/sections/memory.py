"""Checks that an engine respects its memory limit and does not grow over a thousand steps.

Limit: half of the device memory, for the shape of 0.6 B parameters; the section measures the device
memory that all processes use after startup. Growth: the increase of device allocations and of this
process's resident memory between step 200 and step 1,200, while requests start and finish. On a CPU
the section measures only host memory, over a few steps.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail.machine import read_resident_bytes
from gpu.device_parts import STAND_INS
from gpu.engine_runs import random_prompts
from gpu.report import Report, Task
from gpu.shapes import write_shape

_SHARE = 0.5
_MIB = 1 << 20
_OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
}


def run(task: Task, report: Report) -> None:
    """Check the memory limit, then the growth."""
    if task.device not in STAND_INS:
        _look_at_share(task, report)
    _look_at_growth(task, report)


def _look_at_share(task: Task, report: Report) -> None:
    model = write_shape("qwen3-0.6b", task.folder)
    module = torch.get_device_module(task.parts.device_type)
    with LLM(str(model), **task.parts.options, **_OPTIONS, gpu_memory_utilization=_SHARE) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        free, total = module.mem_get_info()
    used = 100 * (total - free) / total
    report.metric("used", used)
    if used < 0.9 * 100 * _SHARE:
        report.fail(f"the engine uses only {used:.1f} % of the memory; it may use {_SHARE:.0%}")


def _look_at_growth(task: Task, report: Report) -> None:
    model = write_shape("tiny", task.folder)
    num_warm, num_steps = (20, 40) if task.small else (200, 1000)
    with LLM(str(model), **task.parts.options, **_OPTIONS, num_gpu_blocks_override=500) as llm:
        _steps(llm, num_warm, task.seed)
        before = _held(task.parts.device_type)
        done = _steps(llm, num_steps, task.seed + 1)
        after = _held(task.parts.device_type)
    if task.device != "cpu":
        report.metric("device_mib", (after[0] - before[0]) / _MIB)
    report.metric("host_mib", (after[1] - before[1]) / _MIB, note=f"{done} steps")


def _steps(llm: LLM, num_steps: int, seed: int) -> int:
    """Run `num` steps while requests start and finish. Return the number of steps."""
    engine, done, number = llm.llm_engine, 0, 0
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=20, ignore_eos=True)
    prompts = random_prompts([5 + 7 * n % 60 for n in range(64)], vocab_size=1000, seed=seed)
    while done < num_steps or engine.has_unfinished_requests():
        if done < num_steps and done % 5 == 0:
            engine.add_request(f"{seed}-{number}", prompts[number % 64], params)
            number += 1
        engine.step()
        done += 1
    return done


def _held(device: str) -> tuple[int, int]:
    """Return the bytes of tensors on the device, and the resident bytes of this process."""
    gc.collect()
    on_device = 0 if device == "cpu" else torch.get_device_module(device).memory_allocated()
    return on_device, read_resident_bytes()

"""Checks sleep mode: tokens before and after both levels, and free memory during sleep."""

from __future__ import annotations

from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail.plugins import PluginRegistry
from gpu.engine_runs import random_prompts
from gpu.report import NeedsDeviceError, Report, Task
from gpu.shapes import num_weight_bytes, write_shape

_CACHE_BYTES = 256 << 20
_SMALL_CACHE_BYTES = 8 << 20


def run(task: Task, report: Report) -> None:
    """Sleep at both levels. Report the share of equal requests and of released memory."""
    worker_cls = PluginRegistry().load("worker", task.parts.worker)
    if "sleep" not in worker_cls.provides:
        raise NeedsDeviceError(f"the worker of {task.device} has no sleep mode")
    cache_bytes = _SMALL_CACHE_BYTES if task.small else _CACHE_BYTES
    options: dict[str, Any] = {
        **task.parts.options,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": True,
        "kv_cache_memory_bytes": cache_bytes,
    }
    shape = "tiny" if task.small else "qwen3-0.6b"
    model = write_shape(shape, task.folder)
    prompts = random_prompts((5, 40, 17), vocab_size=1000, seed=task.seed)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(str(model), **options) as llm:
        expected = _tokens(llm, prompts, params)
        equal, released = 0, []
        for level in (1, 2):
            before = _free_bytes(task)
            llm.sleep(level=level)
            released.append(_free_bytes(task) - before)
            llm.wake_up(tags=["weights"])
            llm.wake_up(tags=["kv_cache"])
            tokens = _tokens(llm, prompts, params)
            equal += sum(left == right for left, right in zip(tokens, expected, strict=True))
    report.metric("equal", 100 * equal / (2 * len(prompts)))
    total = num_weight_bytes(shape) + cache_bytes
    report.metric("released", 100 * min(released) / total)


def _tokens(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _free_bytes(task: Task) -> int:
    return int(torch.get_device_module(task.parts.device_type).mem_get_info()[0])

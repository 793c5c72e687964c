"""Checks with torch's synchronization detector whether steps wait for the device.

Requests of every kind start and finish, and prompts hit the prefix cache. After the first steps,
every wait that torch detects while a step is launched is recorded with its line number. Waiting for
a requested result does not count.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from dovetail import LLM, SamplingParams
from dovetail.plugins import PluginRegistry
from gpu.engine_runs import random_prompts
from gpu.report import NeedsDeviceError, Report, Task
from gpu.shapes import write_shape

_WARM_STEPS = 12
_DETECTED = "called a synchronizing"
"""Part of each warning of a wait. The first use of the detector gives another warning."""
_LENGTHS = (5, 40, 130, 300, 17, 64, 1, 90)


def run(task: Task, report: Report) -> None:
    """Run steps under the detector and report where the host waited."""
    if not hasattr(getattr(torch, task.parts.device_type, None), "set_sync_debug_mode"):
        raise NeedsDeviceError(f"torch has no synchronization detector for {task.device}")
    base = PluginRegistry().load("worker", task.parts.worker)
    worker_cls = watched_worker(base, torch.get_device_module(task.parts.device_type))
    model = write_shape("tiny", task.folder)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "use_tqdm_on_load": False}
    with LLM(str(model), **{**task.parts.options, "worker_cls": worker_cls}, **options) as llm:
        for seed in range(3):
            prompts = random_prompts(_LENGTHS, vocab_size=1000, seed=task.seed + seed // 2)
            llm.generate(prompts, _params(), use_tqdm=False)
        ((num_steps, waits),) = llm.llm_engine.collective_rpc("take_waits")
    report.metric("waits", len(waits), note=f"{num_steps} steps watched")
    for location, count in waits.most_common():
        report.fail(f"{location}: {count} times")


def _params() -> list[SamplingParams]:
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    sampled = {**greedy, "temperature": 0.8}
    kinds: list[dict[str, Any]] = [
        greedy,
        sampled,
        {**sampled, "top_k": 20, "top_p": 0.9},
        {**sampled, "min_p": 0.05, "seed": 7},
        {**greedy, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {**greedy, "repetition_penalty": 1.2},
        {**greedy, "logprobs": 3},
        {**greedy, "min_tokens": 8, "stop_token_ids": [3]},
    ]
    return [SamplingParams(**kind) for kind in kinds]


def watched_worker(base: type, module: Any) -> type:
    """Return a worker class that counts the code lines at which its steps wait for the device."""

    class WatchedWorker(base):
        """The worker, with torch's synchronization detector enabled in each step."""

        def __init__(self, context: Any) -> None:
            super().__init__(context)
            self._num_steps = 0
            self._waits: Counter[str] = Counter()

        def execute_model(self, plan: Any) -> None:
            self._num_steps += 1
            self._watch(super().execute_model, plan)

        def sample_tokens(self, grammar: Any = None) -> Any:
            return self._watch(super().sample_tokens, grammar)

        def take_waits(self) -> tuple[int, Counter[str]]:
            return self._num_steps - _WARM_STEPS, self._waits

        def _watch(self, call: Callable[[Any], Any], argument: Any) -> Any:
            if self._num_steps <= _WARM_STEPS:
                return call(argument)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                module.set_sync_debug_mode("warn")
                try:
                    return call(argument)
                finally:
                    module.set_sync_debug_mode("default")
                    self._waits.update(
                        f"{item.filename}:{item.lineno}"
                        for item in caught
                        if _DETECTED in str(item.message)
                    )

    return WatchedWorker

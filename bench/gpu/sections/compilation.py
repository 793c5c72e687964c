"""Compares tokens and speed of a compiled engine with those of an eager engine."""

from __future__ import annotations

import time

from gpu.device_parts import STAND_INS
from gpu.engine_runs import random_prompts, run_shape
from gpu.report import Report, Task
from gpu.shapes import write_shape


def run(task: Task, report: Report) -> None:
    """Run the same requests eagerly and compiled piecewise, in float32."""
    model = write_shape("tiny-deep", task.folder)
    prompts = random_prompts((5, 40, 17), vocab_size=1000, seed=task.seed)
    expected, eager_s = run_shape(task, model, prompts, dtype="float32")
    start_s = time.perf_counter()
    tokens, compiled_s = run_shape(
        task,
        model,
        prompts,
        dtype="float32",
        compile_level="piecewise",
        compile_backend="eager" if task.device in STAND_INS else "inductor",
        compile_cache="off",
    )
    seconds = time.perf_counter() - start_s
    equal = sum(left == right for left, right in zip(tokens, expected, strict=True))
    report.metric("equal", 100 * equal / len(prompts))
    report.metric("ratio", 100 * eager_s / compiled_s)
    report.metric("seconds", seconds)

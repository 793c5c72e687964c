"""Checks weight offload: tokens with and without it, and how much slower a request is."""

from __future__ import annotations

from gpu.engine_runs import random_prompts, run_shape
from gpu.report import Report, Task
from gpu.shapes import SHAPES, num_layer_bytes, write_shape

_SHARE = 0.8
"""Share of the layers whose weights stay in host memory."""


def run(task: Task, report: Report) -> None:
    """Run the same requests with and without offload. Report equal tokens and the speed."""
    shape = "tiny-deep" if task.small else "qwen3-0.6b"
    model = write_shape(shape, task.folder)
    prompts = random_prompts((5, 40, 17), vocab_size=1000, seed=task.seed)
    num_layers = int(_SHARE * SHAPES[shape]["num_hidden_layers"])
    offload_gb = (num_layers + 0.5) * num_layer_bytes(shape) / (1 << 30)
    expected, usual_s = run_shape(task, model, prompts)
    tokens, offloaded_s = run_shape(task, model, prompts, cpu_offload_gb=offload_gb)
    equal = sum(left == right for left, right in zip(tokens, expected, strict=True))
    report.metric("equal", 100 * equal / len(prompts))
    report.metric("ratio", 100 * usual_s / offloaded_s)
